"""Write samples and texts to a cache, and read a complete cache."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from lightning_cp.errors import CacheError
from lightning_cp.finetune.families import Family, Sample, load_family
from lightning_cp.finetune.latent_cache.index import read_index
from lightning_cp.finetune.latent_cache.rows import CONTENTS, Contents, MediaRow, Row, TextRow, caption_hash, checked
from lightning_cp.finetune.latent_cache.store import read_facts, read_tensors, stored_copies, write_tensors

RowT = TypeVar("RowT", MediaRow, TextRow)


class CacheWriter:
    """Write samples and texts to a cache, after `prepare_cache`. Any number of processes may do so at the same time.

    Each sample and each text is one file, on disk when `add_media` or `add_text` returns: a killed run loses only what
    it was encoding. What is stored already is taken over by `take_media` and `take_text`.

    Args: folder: the cache.
    Attributes: rows: what this writer added and took over.
    Raises: CacheError: the cache is not prepared.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self.rows: list[Row] = []
        self._index = read_index(self.folder)

    def take_media(self, fields: Mapping[str, Any]) -> bool:
        """Take over a stored sample. Returns: False if it is not stored, or was made from other contents.

        Args: fields: `id`, `source_hash`, and the fields of `MediaRow` that have changed since.
        """
        return self._take(MediaRow, fields, "media", fields["id"], fields["source_hash"])

    def take_text(self, caption: str, media_id: str | None = None) -> bool:
        """Take over a stored text, see `add_text`. Returns: False if it is not stored."""
        return self._take(TextRow, {}, "text", caption_hash(caption, media_id))

    def add_media(self, row: MediaRow, tensors: Sample) -> None:
        """Write a sample. Args: tensors: the media tensors, without a batch dim.

        Raises: CacheError: a value is not valid. OSError: the disk is full.
        """
        self._add(row, tensors, f"the sample {ascii(row.id)[:100]}")

    def add_text(self, caption: str, tensors: Sample, *, media_id: str | None = None) -> str:
        """Write the text tensors of a caption. Returns: the caption's hash.

        Args:
            tensors: [length, dim] or [dim].
            media_id: name of the media, if the text encoder also sees the media.
        Raises: CacheError: a value is not valid. OSError: the disk is full.
        """
        self._add(TextRow(caption, media_id), tensors, f"the text of {ascii(caption)[:100]}")
        return caption_hash(caption, media_id)

    def finish(self, rows: Iterable[Row] | None = None) -> None:
        """Complete the cache. Args: rows: `rows` of the writers of all ranks; None: of this writer.

        Raises: CacheError: a caption of a sample has no text, or a sample was added twice. OSError: the disk is full.
        """
        try:
            contents = Contents.of(self.rows if rows is None else rows, self._index.empty_caption)
        except CacheError as error:
            raise CacheError(f"{self.folder} cannot be completed: {error}") from None
        contents.write(self.folder, self._index.hash)

    def _take(self, kind: type[RowT], fields: Mapping[str, Any], *made_from: str) -> bool:
        facts = read_facts(self.folder, self._index.file(*made_from))
        with suppress(CacheError):
            self.rows.append(checked(kind, {**facts, **fields} if isinstance(facts, dict) else None))
            return True
        return False

    def _add(self, row: Row, tensors: Sample, what: str) -> None:
        copies = stored_copies(tensors, what)
        layout = {name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for name, x in copies.items()}
        row = replace(row, tensors=layout)
        try:
            facts = json.loads(json.dumps(asdict(row)))
            checked(type(row), facts)
        except (TypeError, ValueError) as error:  # TypeError: a value that JSON does not have
            raise CacheError(f"{what} cannot be stored: {error}") from error
        write_tensors(self.folder, self._index.file(*row.made_from), copies, facts)
        self.rows.append(row)


class LatentCache:
    """Random access to the samples of a complete cache.

    Opening reads the list of samples, and no tensors. Samples are ordered by id. DataLoader workers, forked or spawned,
    can use the cache. Tensors are compared with their checksums when they are read.

    Args: folder: the cache.
    Raises: CacheError: it is missing, unfinished or damaged; the message names the file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self.index = read_index(self.folder)
        if not (self.folder / CONTENTS).exists():
            samples, texts = (len(list(self.folder.glob(f"{kind}/*/*.safetensors"))) for kind in ("media", "text"))
            raise CacheError(
                f"{self.folder} is not complete: it has {samples} samples and {texts} texts. Run precompute again to "
                "continue"
            )
        self._contents = Contents.read(self.folder, self.index.hash, self.index.empty_caption)
        if missing := _missing(self.folder, self._files()):
            raise CacheError(f"{self.folder / min(missing)} is missing. Run precompute again, which encodes it again")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._contents.media)

    @property
    def rows(self) -> Sequence[MediaRow]:
        """Rows of the samples, ordered by id."""
        return self._contents.media

    @property
    def fingerprint(self) -> dict[str, str]:
        """Fingerprint of what made the cache, see `fingerprint_of`."""
        return dict(self.index.fingerprint)

    def sample(self, i: int, caption: int = 0) -> Sample:
        """Return the tensors of a sample, media and text. Args: caption: which of the row's captions.

        Raises: IndexError: there is no such sample or caption. CacheError: a file is damaged.
        """
        row = self._contents.media[i]
        return {**self._tensors(row), **self.text(row.captions[caption])}

    def text(self, hash: str) -> Sample:
        """Return the text tensors of a caption. Raises: CacheError: there is no such text, or its file is damaged."""
        return self._tensors(self._text(hash))

    def caption(self, hash: str) -> str:
        """Return the caption with a hash. Raises: CacheError: there is no such text."""
        return self._text(hash).caption

    @property
    def empty_text(self) -> Sample | None:
        """Text tensors of the empty caption; None if the text encoder saw the media: no text then fits all samples."""
        return None if self.index.empty_caption is None else self.text(self.index.empty_caption)

    def family(self) -> Family:
        """Return the model family, bound to the stored facts. Raises: FamilyError: it is not registered."""
        return load_family(self.index.family, self.index.facts)

    def verify(self) -> None:
        """Read all files and compare their checksums. Raises: CacheError: a file was changed."""
        for name in sorted(self._files()):
            read_tensors(self.folder, name)

    def _text(self, hash: str) -> TextRow:
        if hash not in self._contents.texts:
            raise CacheError(f"{self.folder} has no text {ascii(hash)[:80]}")
        return self._contents.texts[hash]

    def _tensors(self, row: Row) -> Sample:
        return read_tensors(self.folder, self.index.file(*row.made_from))

    def _files(self) -> set[str]:
        rows: list[Row] = [*self._contents.media, *self._contents.texts.values()]
        return {self.index.file(*row.made_from) for row in rows}


def _missing(folder: Path, files: set[str]) -> set[str]:
    """Return the files that are not there. Folders are listed: to look for each file is slow on a network."""
    there = set[str]()
    for parent in {file.rpartition("/")[0] for file in files}:
        with suppress(OSError):
            there.update(f"{parent}/{name}" for name in os.listdir(folder / parent))
    return files - there
