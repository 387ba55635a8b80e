"""Checkpoints: written all or nothing, read without pickle, refused when cut short.

`lightning_cp.checkpoint.store` writes and reads them. What is here finds and verifies them without importing torch.
"""

from lightning_cp.checkpoint.manifest import (
    CheckpointError,
    FileEntry,
    Manifest,
    find_checkpoint,
    latest_checkpoint,
    read_manifest,
)

__all__ = ["CheckpointError", "FileEntry", "Manifest", "find_checkpoint", "latest_checkpoint", "read_manifest"]
