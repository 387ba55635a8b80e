"""Checkpoints: written all or nothing, read without pickle, rejected if truncated.

`lightning_cp.checkpoint.store` writes and reads them. This module finds and verifies them without importing torch.
"""

from lightning_cp.checkpoint.latest import find_checkpoint, latest_checkpoint, remove_partials
from lightning_cp.checkpoint.manifest import CheckpointError, FileEntry, Manifest, parse_manifest, read_manifest

__all__ = [
    "CheckpointError",
    "FileEntry",
    "Manifest",
    "find_checkpoint",
    "latest_checkpoint",
    "parse_manifest",
    "read_manifest",
    "remove_partials",
]
