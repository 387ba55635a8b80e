"""Rows of a cache's samples and texts, and `contents.json`, which lists them: a cache that has it is complete."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from typing_extensions import override

from lightning_cp.errors import CacheError
from lightning_cp.files import read_json
from lightning_cp.finetune.latent_cache.store import write_file
from lightning_cp.finetune.settings import REPEATS, Use
from lightning_cp.rules import Each, Either, Integer, Number, OneOf, Rule, Text, ruled, rules_of

CONTENTS, PREVIOUS = "contents.json", "previous.json"
_NULL, _COUNT = OneOf((None,)), Integer(1, 2**31 - 1)
T = TypeVar("T")


@dataclass(frozen=True)
class Kind(Rule):
    """A string, also an empty one; or a JSON object with values of a type."""

    kind: type
    values: type = object

    @override
    def passes(self, value: Any) -> bool:
        if isinstance(value, dict):
            return self.kind is dict and all(isinstance(x, self.values) for x in value.values())
        return self.kind is str and isinstance(value, str)

    @override
    def describe(self) -> str:
        return ("a string" if self.kind is str else "a JSON object") + (" of strings" if self.values is str else "")


@dataclass(frozen=True, slots=True)
class MediaRow:
    """One picture or clip of a cache.

    Args:
        id: unique name in the cache.
        source: path of the file, relative to the data folder.
        source_hash: hash of the file's contents: with other contents, the sample is another file of the cache.
        frames: number of pixel frames; 1 for pictures.
        height: pixels.
        width: pixels.
        tokens: number of tokens of the transformer.
        captions: hashes of one or more captions, see `caption_hash`.
        fps: frames per second; None for pictures.
        crop: (top, left, height, width) of the crop, in pixels of the resized source; None without a crop.
        repeats: number of times that an epoch shows the sample.
        weight: weight of the sample in the loss.
        use: `train`; `prior`: trained on, and never held out; `validation`: not trained on.
        tensors: dtype and shape of each tensor; set by the writer.
    """

    id: str = ruled(MISSING, Text())
    source: str = ruled(MISSING, Kind(str))
    source_hash: str = ruled(MISSING, Text())
    frames: int = ruled(MISSING, _COUNT)
    height: int = ruled(MISSING, _COUNT)
    width: int = ruled(MISSING, _COUNT)
    tokens: int = ruled(MISSING, _COUNT)
    captions: tuple[str, ...] = ruled(MISSING, Each(Text()))
    fps: float | None = ruled(None, Either(_NULL, Number(above=0)))
    crop: tuple[int, int, int, int] | None = ruled(None, Either(_NULL, Each(Integer(0), 4)))
    repeats: int = ruled(1, Integer(1, REPEATS))
    weight: float = ruled(1.0, Number(above=0))
    use: str = ruled("train", OneOf(get_args(Use)))
    tensors: Mapping[str, str] = ruled(MISSING, Kind(dict, str), default_factory=dict, hash=False)

    @property
    def made_from(self) -> tuple[str, ...]:
        """What the tensors were made from, see `CacheIndex.file`."""
        return "media", self.id, self.source_hash


@dataclass(frozen=True, slots=True)
class TextRow:
    """One distinct caption of a cache.

    Args:
        caption: the text.
        media_id: name of the media that the text was encoded with, if the text encoder sees the media.
        tensors: dtype and shape of each tensor; set by the writer.
    """

    caption: str = ruled(MISSING, Kind(str))
    media_id: str | None = ruled(None, Either(_NULL, Text()))
    tensors: Mapping[str, str] = ruled(MISSING, Kind(dict, str), default_factory=dict, hash=False)

    @property
    def made_from(self) -> tuple[str, ...]:
        """What the tensors were made from, see `CacheIndex.file`."""
        return "text", caption_hash(self.caption, self.media_id)


Row = MediaRow | TextRow


def caption_hash(caption: str, media_id: str | None = None) -> str:
    """Return the name of a caption's text in the cache: 32 hexadecimal digits.

    Args: media_id: name of the media, if the text encoder also sees the media.
    """
    text = caption if media_id is None else json.dumps([caption, media_id])
    kind = b"caption:" if media_id is None else b"caption and media:"
    return hashlib.sha256(kind + text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def checked(kind: type[T], values: Any) -> T:
    """Build a row, or an index, from plain values. Raises: CacheError: a field is missing, unknown or invalid."""
    rules = rules_of(kind)  # type: ignore[arg-type]
    if not isinstance(values, dict) or values.keys() != rules.keys():
        raise CacheError(f"it must have exactly the fields {', '.join(rules)}, got {ascii(values)[:200]}")
    for name, rule in rules.items():
        if not rule.passes(values[name]):
            raise CacheError(f"{name}={ascii(values[name])[:80]} must be {rule.describe()}")
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})


@dataclass(frozen=True)
class Contents:
    """What a complete cache holds.

    Args:
        media: rows of the samples, ordered by id: the order does not depend on the number of writers.
        texts: rows of the texts by hash.
    """

    media: list[MediaRow]
    texts: dict[str, TextRow]

    @classmethod
    def of(cls, rows: Iterable[Row], empty_caption: str | None) -> Contents:
        """Join rows; texts that no sample has are left out. Args: empty_caption: see `CacheIndex`.

        Raises: CacheError: there are no samples, one is there twice, a text is missing, or tensors differ.
        """
        media, texts = dict[str, MediaRow](), dict[str, TextRow]()
        for row in rows:
            if isinstance(row, TextRow):
                texts[row.made_from[1]] = row
            elif media.setdefault(row.id, row) is not row:
                raise CacheError(f"the sample {ascii(row.id)[:100]} is listed twice")
        if not media:
            raise CacheError("it has no samples: add some before the cache is finished")
        used = {hash: f"a caption of sample {ascii(row.id)[:100]}" for row in media.values() for hash in row.captions}
        used |= {} if empty_caption is None else {empty_caption: "the empty caption"}
        for hash, what in used.items():
            if hash not in texts:
                raise CacheError(f"it has no text {hash[:80]}, {what}")
        found = cls([row for _, row in sorted(media.items())], {hash: texts[hash] for hash in used})
        _check_tensors((*found.media, *found.texts.values()))
        return found

    @classmethod
    def read(cls, folder: Path, cache_hash: str, empty_caption: str | None) -> Contents:
        """Read `contents.json`. Args: cache_hash: `CacheIndex.hash`. Raises: CacheError: it is damaged."""
        try:
            values = read_json(folder / CONTENTS)
            if values.keys() != {"cache", "media", "texts"} or values["cache"] != cache_hash:
                raise CacheError("it belongs to another cache")
            media = [checked(MediaRow, one) for one in values["media"]]
            return cls.of((*media, *(checked(TextRow, one) for one in values["texts"])), empty_caption)
        except (ValueError, TypeError) as error:
            raise CacheError(
                f"{folder / CONTENTS} is damaged: {error}. Run precompute again: it encodes only what is missing"
            ) from error

    def write(self, folder: Path, cache_hash: str) -> None:
        """Write `contents.json`, which makes the cache complete."""
        values = {"media": [asdict(row) for row in self.media], "texts": [asdict(row) for row in self.texts.values()]}
        write_file(folder, CONTENTS, json.dumps({"cache": cache_hash, **values}).encode())
        (folder / PREVIOUS).unlink(missing_ok=True)


def listed_ids(folder: Path) -> set[str]:
    """Return the ids of the samples that a folder's cache had when it was complete; none if it never was."""
    for name in (CONTENTS, PREVIOUS):
        with suppress(ValueError, KeyError, TypeError):
            return {str(row["id"]) for row in read_json(folder / name)["media"]}
    return set()


def _check_tensors(rows: Iterable[Row]) -> None:
    """Check that all samples have the same tensors, so that a batch of one size can be joined."""
    first: dict[Any, tuple[str, Any]] = {}
    for row in rows:
        name = f"the {row.made_from[0]} {ascii(row.made_from[1])[:100]}"
        same: dict[Any, Any] = {type(row): {name: x.partition(" ")[0] for name, x in row.tensors.items()}}
        if isinstance(row, MediaRow):
            same[row.frames, row.height, row.width] = row.tensors.get("latents")
        for key, value in same.items():
            other, expected = first.setdefault(key, (name, value))
            if value != expected:
                raise CacheError(f"{name} has the tensors {value}, but {other} has {expected}")
    both = first[MediaRow][1].keys() & first[TextRow][1].keys() if TextRow in first else set()
    if both:
        raise CacheError(f"{', '.join(sorted(both))} are names of media tensors and of text tensors")
