"""Describe the encoders of a cache, to detect a cache with other weights, settings or package versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_cp.errors import CacheError, StaleCacheError
from lightning_cp.finetune.families import Components

Fingerprint = dict[str, str]
"""Identity of a cache's encoders: names such as "vae.weights" and "package.torch", with hashes or readable values."""

_SAMPLED = 256  # elements of each tensor
_PACKAGES = ("torch", "diffusers", "transformers", "tokenizers", "ftfy")
_ORIGIN = {"_name_or_path", "_commit_hash", "_diffusers_version", "transformers_version"}
# Keys of a tokenizer's files that do not change its output: where it was loaded from, and settings of its last call.
_NOT_IN_FILES = _ORIGIN | {
    *("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "is_local", "local_files_only"),
    *("truncation", "padding"),
}
_WORDS = {
    "weights": "the weights of {} changed",
    "tensors": "names, shapes or dtypes of the weights of {} changed",
    "config": "the config of {} changed",
    "files": "the files of {} changed (vocabulary, chat template or settings)",
}


def fingerprint_of(pipe: Any, components: Components | Iterable[str], settings: Mapping[str, Any]) -> Fingerprint:
    """Describe everything that the encoded samples depend on, which does not include the scheduler.

    - Models: the config, names, shapes and dtypes of all tensors, and a hash of 256 elements of each tensor, at
      positions that depend on its name and shape. (To read all bytes would take minutes for 20 GB.) If a fraction p of
      a tensor's elements has changed, this is missed with probability (1 - p)^256: fine-tuning or another checkpoint is
      detected, one changed element of a large tensor may be missed.
    - Tokenizers and image processors: all files that `save_pretrained` writes.
    - Packages: versions of torch, diffusers, transformers, tokenizers and ftfy (if ftfy is installed, some pipelines
      change the text).

    Args:
        pipe: a pipeline with its weights loaded.
        components: the family's components (text and media encoders count), or names.
        settings: plain values that the samples depend on: sizes, dtype, crop, maximum lengths.
    Returns: plain strings by name, for `CacheIndex`.
    Raises: CacheError: a component's weights are not in memory, or its kind is unknown.
    """
    names = (*components.text, *components.media) if isinstance(components, Components) else tuple(components)
    entries = {"pipeline": type(pipe).__name__}
    for name in dict.fromkeys(names):
        entries |= {f"{name}{part}": value for part, value in _component(name, getattr(pipe, name, None)).items()}
    entries |= {f"settings.{name}": _json(value) for name, value in settings.items()}
    return entries | {f"package.{package}": _version(package) for package in _PACKAGES}


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Describe the differences between two fingerprints in words."""
    changed = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    return [_in_words(name, old.get(name), new.get(name)) for name in changed]


def check_fresh(folder: Path, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Raise StaleCacheError if the cache in `folder`, with fingerprint `old`, does not have the fingerprint `new`."""
    changes = differences(old, new)
    if changes:
        raise StaleCacheError(
            f"{folder} was made with other inputs: {'; '.join(changes)}. Choose another output, or delete this cache"
        )


def _in_words(name: str, old: str | None, new: str | None) -> str:
    component, _, part = name.rpartition(".")
    if part in _WORDS and old is not None and new is not None:
        return _WORDS[part].format(component)
    if component == "package":
        return f"the version of {part} was {old} and is {new}"
    return f"{name} was {'absent' if old is None else old[:200]} and is {'absent' if new is None else new[:200]}"


def _component(name: str, component: Any) -> Fingerprint:
    if component is None:
        return {"": "absent"}
    kind = {"": type(component).__name__}
    if isinstance(component, nn.Module):
        return {**kind, **_model(name, component)}
    if hasattr(component, "save_pretrained"):
        return {**kind, ".files": _files(component)}
    if hasattr(component, "config"):
        return {**kind, ".config": _hash(_json(_config(component)))}
    raise CacheError(
        f"{name} is a {type(component).__name__}: a fingerprint needs a torch module, or an object with save_pretrained"
    )


def _model(name: str, model: nn.Module) -> Fingerprint:
    layout, digest, dtypes = [], hashlib.sha256(), set[str]()
    for key, tensor in sorted(_flat(model.state_dict().items())):
        if tensor.is_meta:
            raise CacheError(f"{name}.{key} is not in memory: compute the fingerprint before the pipeline is offloaded")
        layout.append([key, list(tensor.shape), str(tensor.dtype)])
        digest.update(_sample(key, tensor))
        if tensor.is_floating_point():
            dtypes.add(str(tensor.dtype))
    return {
        ".config": _hash(_json(_config(model))),
        ".dtype": ", ".join(sorted(dtypes)),
        ".tensors": _hash(_json(layout)),
        ".weights": digest.hexdigest()[:32],
    }


def _flat(tensors: Iterable[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    """List plain tensors by name; quantised ones are split into the tensors that they consist of."""
    plain: list[tuple[str, Tensor]] = []
    for name, x in tensors:
        if hasattr(x, "__tensor_flatten__"):
            plain += _flat((f"{name}.{inner}", getattr(x, inner)) for inner in x.__tensor_flatten__()[0])
        elif isinstance(x, Tensor):
            plain.append((name, x.detach()))
    return plain


def _sample(name: str, x: Tensor) -> bytes:
    """Return the bytes of some elements; their positions depend on name and shape."""
    if x.numel() == 0:
        return b""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.element_size())
    bits = x if whole is None else x.view(whole)  # indexing is not defined for all dtypes, such as float8
    if x.numel() > _SAMPLED:
        seed = int.from_bytes(hashlib.sha256(f"{name} {list(x.shape)}".encode()).digest()[:8], "little")
        positions = np.random.default_rng(seed).integers(x.numel(), size=_SAMPLED)
        index = tuple(torch.from_numpy(one.copy()).to(x.device) for one in np.unravel_index(positions, tuple(x.shape)))
        bits = bits[index]  # the index has one entry per dim: a tensor in another memory format is not copied
    return bits.cpu().contiguous().numpy().tobytes()


def _config(component: Any) -> Any:
    config: Any = getattr(component, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else config


def _files(component: Any) -> str:
    digest = hashlib.sha256()
    with TemporaryDirectory() as name:
        component.save_pretrained(name)
        for path in sorted(path for path in Path(name).rglob("*") if path.is_file()):
            content = path.read_bytes()
            if path.suffix == ".json":
                content = _saved_json(content)
            digest.update(_hash_bytes(path.relative_to(name).as_posix().encode()) + _hash_bytes(content))
    return digest.hexdigest()[:32]


def _saved_json(content: bytes) -> bytes:
    values = json.loads(content)
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if key not in _NOT_IN_FILES}
    return json.dumps(values, sort_keys=True).encode()


def _json(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Convert a config to JSON values, without its origin. Other objects count by their class."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if key not in _ORIGIN}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(_json(one) for one in value)
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value) if isinstance(value, torch.dtype | Path) else type(value).__qualname__


def _hash(text: str) -> str:
    return _hash_bytes(text.encode()).hex()[:32]


def _hash_bytes(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
