"""Read a folder of images and videos, with captions in text files."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from lightning_cp.errors import DataError
from lightning_cp.finetune.media.limits import CAPTION_BYTES
from lightning_cp.finetune.media.source import ONE_REFERENCE, Entry, Skipped, Source, is_image, is_video
from lightning_cp.finetune.media.table import captions_of, is_unicode, lines_of, read_text
from lightning_cp.finetune.settings import TABLE_SUFFIXES

_NAMED = 10  # captions that cannot be read, in one error
_KINDS = ("reference", "mask")  # words at the ends of names, before the suffix, of files that belong to another one
_NUMBERED = re.compile(r"(?P<name>.+)\.reference[-_. ]?\d+")  # names of several references, which are refused


def read_folder(folder: Path) -> tuple[list[Entry], list[Skipped]]:
    """Find the images and videos in a folder and below it, sorted by path; hidden files are left out.

    `a.reference.png` is the reference of `a.png`; `a.reference.mp4` that of `a.mp4`, its control clip; `a.mask.png` is
    the mask of either.

    Raises: DataError: a folder or a caption file cannot be read, or a file has several references or masks.
    """
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    unreadable: list[str] = []  # all are reported together
    for files in _walk(folder, skipped):
        attached = _attached([file for file in files if is_image(file) or is_video(file)])
        files = [file for file in files if file not in attached.values()]
        media = {file for file in files if is_image(file) or is_video(file)}
        stems = {file.stem for file in media}
        for (name, kind), file in attached.items():
            if name not in stems:
                skipped.append(Skipped(file, f"a {kind}, but no image or video is called {name}"))
        texts = {file.stem: file for file in files if file.suffix.lower() == ".txt"}
        for file in files:
            reason = _refusal(file, stems)
            if reason:
                skipped.append(Skipped(file, reason))
            elif file in media:
                try:
                    text = read_text(texts[file.stem], limit_bytes=CAPTION_BYTES) if file.stem in texts else ""
                except DataError as error:
                    unreadable.append(str(error))
                    continue
                path = file.relative_to(folder).as_posix()
                reference, mask = (attached.get((file.stem, kind)) for kind in _KINDS)
                source = Source(path, file, captions_of(lines_of(text)), reference=reference, mask=mask)
                entries.append(Entry(source, path, where=str(file)))
    if unreadable:
        more = f"; and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
        raise DataError("; ".join(unreadable[:_NAMED]) + more)
    return sorted(entries, key=lambda entry: entry.source.file.parts), skipped


def _walk(folder: Path, skipped: list[Skipped]) -> Iterator[list[Path]]:
    """Yield the files of a folder, and of all folders below it.

    Each folder is read once, by its path without links if it has one below `folder`: links that lead to a folder
    several times, or back, cannot multiply its files.
    """
    waiting, links, seen = [folder], deque[Path](), dict[tuple[int, int], Path]()
    while waiting or links:
        path = waiting.pop() if waiting else links.popleft()
        try:
            status = path.stat()
            first = seen.setdefault((status.st_dev, status.st_ino), path)
            if first is not path:
                skipped.append(Skipped(path, f"a link to a folder that is read already, as {first}"))
                continue
            with os.scandir(path) as found:
                inside = sorted((one for one in found if not one.name.startswith(".")), key=lambda one: one.name)
        except OSError as error:
            raise DataError(f"the folder {path} cannot be read: {error.strerror}") from error
        yield [path / one.name for one in inside if not _is_folder(one)]
        folders = [one for one in inside if _is_folder(one)]
        links.extend(path / one.name for one in folders if one.is_symlink())
        waiting.extend(path / one.name for one in reversed(folders) if not one.is_symlink())


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder or a link to one; False also for a link to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _attached(media: list[Path]) -> dict[tuple[str, str], Path]:
    """Return references and masks by the name of their media and by their kind.

    Raises: DataError: several of a kind are of the same media.
    """
    found: dict[tuple[str, str], Path] = {}
    stems = {file.stem for file in media}
    for file in media:
        numbered = _NUMBERED.fullmatch(file.stem)
        if numbered is not None and numbered["name"] in stems:
            raise DataError(f"{file} is one of several references of {numbered['name']}: {ONE_REFERENCE}")
        name, _, kind = file.stem.rpartition(".")
        if kind not in _KINDS or not name:
            continue
        if (name, kind) in found:
            reason = ONE_REFERENCE if kind == "reference" else "a sample has one mask"
            raise DataError(f"{file} and {found[name, kind].name} are both {kind}s of {name}: {reason}")
        if kind == "mask" and not is_image(file):
            raise DataError(f"{file} must be an image: the mask of a clip holds for all of its frames")
        found[name, kind] = file
    return found


def _refusal(file: Path, stems: set[str]) -> str | None:
    if not is_unicode(str(file)):
        return "its name is not UTF-8: rename it"
    suffix = file.suffix.lower()
    if suffix == ".txt":
        return None if file.stem in stems else "no image or video has this name"
    if suffix in TABLE_SUFFIXES:
        return "a table: give its path instead of the folder's to use it"
    if not (is_image(file) or is_video(file)):
        return f"files with the suffix {suffix} are not used" if suffix else "files without a suffix are not used"
    if not os.path.exists(file):
        return "a link to a file that does not exist"
    return None if os.path.isfile(file) else "not a regular file"
