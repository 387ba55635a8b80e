"""Read the index of a pipeline's folder, of a modular pipeline too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_cp.files import read_json

PIPELINE_INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"  # of a modular pipeline of diffusers


def index_file(folder: Path) -> Path | None:
    """Return the index of a pipeline's folder, or the one of a modular pipeline; None if it is no pipeline."""
    return next((path for name in (PIPELINE_INDEX, MODULAR_INDEX) if (path := folder / name).is_file()), None)


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a pipeline's folder: its class, its settings, and [library, class] of each component.

    Raises: ValueError: the file is missing or damaged; names it.
    """
    return plain_index(read_json(index_file(folder) or folder / PIPELINE_INDEX))


def plain_index(index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the index of a modular pipeline in the form of others: without where each component is loaded from."""
    return {name: x[:2] if isinstance(x, list) and len(x) == 3 else x for name, x in index.items()}
