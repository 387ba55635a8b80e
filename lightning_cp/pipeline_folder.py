"""Find a pipeline, and read its index, of a modular pipeline too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_cp.files import read_json

PIPELINE_INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"  # of a modular pipeline of diffusers


_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_hub_id(source: str) -> bool:
    """Return whether a source is an id on the Hub, owner/name. Other names, and those of existing files, are paths."""
    return _HUB_ID.fullmatch(source) is not None and not Path(source).exists()


def check_source(source: str | Path, setting: str) -> None:
    """Check that a source is a folder or an id on the Hub, without asking the Hub. Raises: ValueError: it is not."""
    if not Path(source).is_dir() and not is_hub_id(str(source)):
        raise ValueError(f"{setting}={source} must be a pipeline's folder, or the id of one on the Hub (owner/name)")


def find_pipeline(source: str | Path, *files: str, setting: str) -> Path:
    """Return the folder of a pipeline. From the Hub, or its cache, the index and some files are downloaded.

    The Hub is asked once, so a name that does not exist is an error at once; diffusers would ask again for minutes.

    Args:
        source: folder, or id on the Hub.
        files: patterns of further files.
        setting: name of the setting that holds `source`, for error messages.
    Raises: ValueError: it is neither, or cannot be downloaded.
    """
    check_source(source, setting)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    ignored = ["*.fp16.safetensors", "*.bf16.safetensors"]
    try:
        wanted = [PIPELINE_INDEX, MODULAR_INDEX, *files]
        return Path(snapshot_download(str(source), allow_patterns=wanted, ignore_patterns=ignored))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).split("\n")), "").strip()
        raise ValueError(f"{setting}={source} is not a folder, and cannot be downloaded: {reason}") from None


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
