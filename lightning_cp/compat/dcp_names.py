"""Private names of torch's distributed checkpoints (DCP)."""

from __future__ import annotations

from torch.distributed.checkpoint import filesystem

from lightning_cp.compat.versions import private_names

with private_names("torch"):
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.checkpoint.filesystem import _StoragePrefix
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
    from torch.serialization import _get_layout

# Names of classes and functions, as `dcp_index` finds them in an index.
STORAGE_INFO = StorageInfo.__name__
GET_LAYOUT = _get_layout.__name__
MEMORY_FORMAT = _MEM_FORMAT_ENCODING.__name__
MEMORY_FORMATS = tuple(member.name for member in _MEM_FORMAT_ENCODING)

# Names in the index that DCP pickles: they are compared with the file's names, and never called.
PICKLED_NAMES = (
    f"{filesystem.__name__}.{StorageInfo.__name__}",
    f"{filesystem.__name__}.{_StoragePrefix.__name__}",
    f"{_get_layout.__module__}.{_get_layout.__name__}",
)

__all__ = ["GET_LAYOUT", "MEMORY_FORMAT", "MEMORY_FORMATS", "PICKLED_NAMES", "STORAGE_INFO", "StorageInfo"]
