"""Find the media of several folders and tables, each with its own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_cp.errors import DataError
from lightning_cp.finetune.media.source import Skipped, Source, Sources
from lightning_cp.finetune.media.sources import find_sources
from lightning_cp.finetune.settings import CAPTION, REPEATS, DataFolder


def find_in_folders(folders: Sequence[DataFolder], *, captions: str = "required", **options: Any) -> Sources:
    """Find the media of all folders.

    Args:
        folders: at least one; their order does not matter, except for the default of `DataFolder.name`.
        captions, options: see `find_sources`.
    Raises: DataError: also if samples of two folders would have one name, no folder is trained on, or a file of the
        validation set is trained on, too.
    """
    named = list(_named(folders))
    if all(folder.use == "validation" for folder in folders):
        raise DataError(f"use=validation is set for each of the {len(folders)} folders: none is left to train on")
    origins = dict[Path, str]()  # the same folder, given twice, has the same files
    sources, skipped = list[Source](), list[Skipped]()
    for folder, name in named:
        has_own = CAPTION not in folder.caption
        rule: Any = "optional" if has_own else captions
        found = find_sources(folder.path, captions=rule, caption_column=folder.caption_column, **options)
        origin = origins.setdefault(folder.path.resolve(), name)
        sources += [_with_settings(source, folder, name, origin) for source in found.sources]
        skipped += found.skipped
    _check_validation(sources)
    return Sources(tuple(sources), tuple(dict.fromkeys(skipped)))


def _named(folders: Sequence[DataFolder]) -> Iterator[tuple[DataFolder, str]]:
    seen = dict[str, Path]()
    for i, folder in enumerate(folders):
        name = folder.name
        if name is None:
            path = Path(os.path.abspath(folder.path))
            name = "" if not i else path.name if path.is_dir() else path.stem
        if name in seen:
            raise DataError(
                f"{seen[name]} and {folder.path} both have the name {name!r} in the cache: give one of them another, "
                "such as name=second"
            )
        seen[name] = folder.path
        yield folder, name


def _with_settings(source: Source, folder: DataFolder, name: str, origin: str) -> Source:
    repeats = source.repeats * folder.repeats
    if repeats > REPEATS:
        raise DataError(f"{source.file}: repeats={repeats} of its table and its folder must be at most {REPEATS}")
    return replace(
        source,
        id=f"{name}/{source.id}" if name else source.id,
        origin=f"{origin}/{source.origin}" if origin else source.origin,
        captions=folder.captioned(source.captions),
        repeats=repeats,
        sizes=folder.sizes,
        weight=folder.weight,
        use=folder.use,
    )


def _check_validation(sources: Sequence[Source]) -> None:
    ids, held_out = dict[str, Source](), {x.file.resolve() for x in sources if x.use == "validation"}
    for source in sources:
        other = ids.setdefault(source.id, source)
        if other is not source:
            raise DataError(
                f"{other.file} and {source.file} would both be called {source.id} in the cache: set another name for "
                "one of the folders, such as name=second"
            )
        if source.use != "validation" and source.file.resolve() in held_out:
            raise DataError(
                f"{source.file} is in the validation set and is trained on: take it out of one of the folders, or set "
                "data.validation in place of use=validation"
            )
