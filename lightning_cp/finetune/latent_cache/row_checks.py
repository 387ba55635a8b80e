"""Check the fields of rows before objects are built from them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from lightning_cp.files import parse_json
from lightning_cp.finetune.media.limits import REPEATS
from lightning_cp.finetune.media.source import Use

SHARD_NAME = re.compile(r"(media|text)-\d{5,}-\d{6,}\.safetensors")
_USES = get_args(Use)
_HASH = re.compile(r"[0-9a-f]{32}")
Checks = Mapping[str, tuple[Callable[[Any], bool], str]]


class DamagedError(ValueError):
    """A file of a cache with an invalid value; the message names it."""


def parse(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises: DamagedError: it is none, or is nested too deeply."""
    try:
        return {**parse_json(text)}
    except TypeError as error:
        raise DamagedError("it is not a JSON object") from error
    except ValueError as error:
        raise DamagedError(f"it is not valid JSON ({type(error).__name__})") from error


def check_fields(values: Mapping[str, Any], checks: Checks) -> None:
    """Raise DamagedError if a field is missing, unknown or invalid."""
    if values.keys() != checks.keys():
        raise DamagedError(f"it must have exactly the fields {', '.join(checks)}, got {ascii(list(values))[:200]}")
    for name, (is_valid, wanted) in checks.items():
        if not is_valid(values[name]):
            raise DamagedError(f"{name}={ascii(values[name])[:80]} must be {wanted}")


def _is_integer(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 62


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_hash(value: Any) -> bool:
    return type(value) is str and _HASH.fullmatch(value) is not None


def _is_shard(value: Any) -> bool:
    return type(value) is str and (value == "" or SHARD_NAME.fullmatch(value) is not None)


def _is_rate(value: Any) -> bool:
    return value is None or _is_weight(value)


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _is_crop(value: Any) -> bool:
    return value is None or (type(value) is list and len(value) == 4 and all(map(_is_integer, value)))


def _are_hashes(value: Any) -> bool:
    return type(value) is list and len(value) > 0 and all(map(_is_hash, value))


_COUNT = (_is_integer, "an integer of at least 0")
_POSITIVE = (lambda value: _is_integer(value, 1), "an integer of at least 1")
_NAME = (lambda value: _is_text(value) and value != "", "a string that is not empty")
_FILE = (_is_shard, "the name of a shard")
MEDIA_FIELDS: Checks = {
    "id": _NAME,
    "source": (_is_text, "a string"),
    "source_hash": (_is_text, "a string"),
    "frames": _POSITIVE,
    "height": _POSITIVE,
    "width": _POSITIVE,
    "tokens": _POSITIVE,
    "captions": (_are_hashes, "one or more caption hashes (caption_hash)"),
    "fps": (_is_rate, "a positive number or None"),
    "crop": (_is_crop, "(top, left, height, width) or None"),
    "repeats": (lambda value: _is_integer(value) and value <= REPEATS, f"an integer from 0 to {REPEATS}"),
    "weight": (_is_weight, "a positive number"),
    "use": (lambda value: value in _USES, f"one of {', '.join(_USES)}"),
    "shard": _FILE,
    "number": _COUNT,
}
TEXT_FIELDS: Checks = {
    "hash": (_is_hash, "a hash of 32 hexadecimal digits"),
    "caption": (_is_text, "a string"),
    "length": _COUNT,
    "media_id": (lambda value: value is None or _is_text(value), "a string or None"),
    "shard": _FILE,
}
SHARD_FIELDS: Checks = {
    "shard": _FILE,
    "size_bytes": _COUNT,
    "crc32": _COUNT,
    "rows": _POSITIVE,
    "cache": (_is_text, "a string"),
}
