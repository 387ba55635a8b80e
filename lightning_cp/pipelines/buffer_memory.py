"""Check, in the first block of the first step, that the keys and values of all blocks fit into free memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_cp.attention.buffered import KeyBuffer
from lightning_cp.engine.installed import Installed
from lightning_cp.errors import PlanError
from lightning_cp.launch.machine import free_memory_bytes


def check_buffers_fit(installed: Installed, blocks: Sequence[str], first: Sequence[KeyBuffer], *, patches: int) -> None:
    """Estimate the buffers of a rank's blocks from those of its first block, and compare with the free memory.

    Args:
        blocks: paths of the blocks that this rank computes. first: buffers that the first of them has filled.
        patches: number of patches, for the error.
    Raises: PlanError: the buffers of the other blocks need more than the free memory.
    """
    tensors = [x for buffer in first for x in buffer.tensors]
    if not tensors:
        return
    counts = [_attentions(installed, path) for path in blocks]
    of_first = sum(x.nbytes for x in tensors)
    needed = of_first * sum(counts[1:]) // max(counts[0], 1)
    free = free_bytes(tensors[0].device)
    if free is not None and needed > free:
        kind, device = type(installed.module).__name__, tensors[0].device
        raise PlanError(
            f"patches={patches}: the keys and values of the {len(blocks)} blocks of {kind} on this rank take "
            f"{(of_first + needed) / 1e9:,.2f} GB for each branch of guidance, but {device} has {free / 1e9:,.2f} GB "
            "of free memory: use more stages (pipe), ulysses, cfg=2 or fewer samples"
        )


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, with what torch's allocator holds unused; None if it is unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return free_memory_bytes("cpu") if device.type == "cpu" else None


def _attentions(installed: Installed, block: str) -> int:
    """Count the modules of a block that attend across ranks."""
    return sum(path == block or path.startswith(f"{block}.") for path in installed.rules.attention)
