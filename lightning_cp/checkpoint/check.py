"""Check each field of a manifest before anything is built from it."""

import json
import math
import re
from typing import Any

TREE = "tree"
"""Key of the checkpoint's facts: a tree of names that shows how the tensors of the states are nested."""
_FIELDS = {"step", "saved_at_s", "files", "facts"}
_MOST_STEP, _MOST_TIME_S, _MOST_DEPTH = 10**15, 1e12, 100
_FILE_NAME = re.compile(r"[^/\\\0]+\.safetensors")


class DamagedError(ValueError):
    """A manifest with an invalid value; the message names it."""


def parse(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises: DamagedError: invalid, nested too deeply, or with a duplicate key."""
    try:
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"it is not valid JSON ({type(error).__name__})") from error
    if type(fields) is not dict:
        raise DamagedError("it is not a JSON object")
    return fields


def check_manifest(fields: dict[str, Any]) -> None:
    """Check the fields of a manifest. Raises: DamagedError: a field is missing, unknown or invalid."""
    if fields.keys() != _FIELDS:
        raise DamagedError(f"it must have exactly the fields {', '.join(sorted(_FIELDS))}")
    _check_integer("step", fields["step"], _MOST_STEP)
    saved_at_s = fields["saved_at_s"]
    if type(saved_at_s) not in (int, float) or not 0 <= saved_at_s <= _MOST_TIME_S:
        raise DamagedError(f"saved_at_s={_show(saved_at_s)} must be a time in seconds since 1970")
    for name, entry in _dict("files", fields["files"]).items():
        if not _FILE_NAME.fullmatch(name) or name.startswith("."):
            raise DamagedError(f"the file name {_show(name)} must be a name without a folder that ends in .safetensors")
        if _dict(name, entry).keys() != {"size_bytes", "crc32"}:
            raise DamagedError(f"{_show(name)} must have exactly size_bytes and crc32")
        _check_integer("size_bytes", entry["size_bytes"], 1 << 62)
        _check_integer("crc32", entry["crc32"], (1 << 32) - 1)
    facts = _dict("facts", fields["facts"])
    if "dict" not in _dict(TREE, facts.get(TREE)):
        raise DamagedError(f"its {TREE} is not a dict of states")
    tensor_names(facts[TREE])
    if "seed" in facts and type(facts["seed"]) is not int:
        raise DamagedError(f"seed={_show(facts['seed'])} must be an integer")
    if "sampler" in facts:
        _dict("sampler", facts["sampler"])


def tensor_names(tree: Any) -> set[str]:
    """List the tensor names in a tree of `flatten_state`. Raises: DamagedError: the tree is invalid."""
    names: set[str] = set()
    _walk(tree, names, 0)
    return names


def _walk(tree: Any, names: set[str], depth: int) -> None:
    if depth > _MOST_DEPTH:
        raise DamagedError(f"its {TREE} is nested deeper than {_MOST_DEPTH} levels")
    if tree is None or type(tree) in (str, int, float, bool):
        return
    kind, value = next(iter(tree.items())) if type(tree) is dict and len(tree) == 1 else ("", None)
    if kind == "tensor" and type(value) is str and value not in names:
        names.add(value)
    elif kind == "dict" and type(value) is list and all(map(_is_pair, value)):
        if len({key for key, _ in value}) != len(value):
            raise DamagedError(f"a dict in its {TREE} has a duplicate key")
        for _, item in value:
            _walk(item, names, depth + 1)
    elif kind in ("list", "tuple") and type(value) is list:
        for item in value:
            _walk(item, names, depth + 1)
    else:
        raise DamagedError(f"its {TREE} contains something other than tensors, dicts, lists, tuples and plain values")


def _is_pair(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and type(value[0]) in (str, int, bool)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise DamagedError("a JSON object has a duplicate key")
    return unique


def _dict(name: str, value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise DamagedError(f"{_show(name)} must be a JSON object")
    return value


def _check_integer(name: str, value: Any, maximum: int) -> None:
    if type(value) is not int or not 0 <= value <= maximum:
        raise DamagedError(f"{name}={_show(value)} must be an integer from 0 to {maximum}")


def _show(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return ascii(value)[:80] if isinstance(value, str | int | float | None) else type(value).__name__
