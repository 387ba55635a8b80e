"""Leave the process group at the end of a job, so that the same process can join another one."""

from __future__ import annotations

import torch.distributed as dist

from lightning_cp.comm.background import wait_for_gathers
from lightning_cp.launch.stall import stop_watch

_GATHERS_S = 5.0  # wait for background gathers; other ranks may have failed


def leave_process_group() -> None:
    """End this rank's watch and background gathers, then destroy its process groups."""
    stop_watch()
    wait_for_gathers(within_s=_GATHERS_S)
    dist.destroy_process_group()
