"""Add metadata to the headers of a LoRA's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_cp.checkpoint.folder import atomic_file


def add_metadata(folder: Path, values: Mapping[str, str]) -> None:
    """Add values to the header of each safetensors file in a folder. Tensors and other values stay.

    Call it on one rank. A run that is killed leaves each file with or without the values.

    Raises: OSError: a file cannot be written.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = {**(opened.metadata() or {}), **values}
        with atomic_file(path) as scratch:
            save_file(tensors, scratch, metadata=metadata)
