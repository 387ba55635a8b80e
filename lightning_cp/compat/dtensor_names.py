"""Private names of torch's DTensor. The import takes a moment: import this module where it is needed."""

from __future__ import annotations

from lightning_cp.compat.versions import private_names

with private_names("torch"):
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["compute_local_shape_and_global_offset"]
