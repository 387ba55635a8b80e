"""Private names of torch's distributed checkpoints (DCP)."""

from __future__ import annotations

from torch.distributed.checkpoint import filesystem

from lightning_cp.compat.versions import private_names

with private_names("torch"):
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.checkpoint.filesystem import _StoragePrefix
    from torch.serialization import _get_layout

# Names in the index that DCP pickles: they are compared with the file's names, and never called.
PICKLED_NAMES = (
    f"{filesystem.__name__}.{StorageInfo.__name__}",
    f"{filesystem.__name__}.{_StoragePrefix.__name__}",
    f"{_get_layout.__module__}.{_get_layout.__name__}",
)

__all__ = ["PICKLED_NAMES", "StorageInfo"]
