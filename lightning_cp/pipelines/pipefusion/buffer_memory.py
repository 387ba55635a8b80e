"""Check, before the first evaluation, that the keys and values of all blocks of a rank fit into its free memory.

They are counted in a forward of a new model of the same configuration, on tensors without storage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp.attention.heads import assign_heads, head_shares
from lightning_cp.comm.agree import gather_objects
from lightning_cp.compat.torch_names import fake_tensors
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.apply import parallelize
from lightning_cp.engine.installed import Installed
from lightning_cp.engine.meta import default_dtype
from lightning_cp.engine.rules.paths import submodule
from lightning_cp.errors import PlanError
from lightning_cp.launch.machine import free_memory_bytes
from lightning_cp.mesh.groups import SINGLE_RANK, MeshGroups
from lightning_cp.nest import of_type, replace
from lightning_cp.pipelines.pipefusion.evaluation import PatchEvaluation
from lightning_cp.pipelines.pipefusion.key_buffers import Buffer, KeyBuffer
from lightning_cp.pipelines.pipefusion.stages import blocks_of
from lightning_cp.pipelines.result_layout import forget_oldest, key_of
from lightning_cp.undoable import intercept_calls, undo_all


@dataclass(frozen=True)
class BufferCounts:
    """Buffers that one evaluation of a model fills, with the heads of all ranks.

    Attributes: blocks: the buffers of each block. others: the buffers of modules outside of the blocks.
    """

    blocks: list[list[Buffer]]
    others: list[Buffer]


def count_buffers(installed: Installed, args: tuple[Any, ...], kwargs: dict[str, Any], *, patches: int) -> BufferCounts:
    """Evaluate the whole sequence with a model that is parallel over one rank, and return the buffers.

    Of blocks with weights and arguments of the same shapes, only the first is computed, so the output has no meaning.
    """
    evaluation = PatchEvaluation.of(installed.session, patches)
    computed: dict[Hashable, tuple[Any, list[Buffer]]] = {}
    by_block: list[list[Buffer]] = []

    def around(block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weights = tuple((name, tuple(x.shape)) for name, x in block.named_parameters())
        key, start = (type(block), weights, key_of((args, kwargs))), len(evaluation.buffers)
        if key not in computed:
            output = call(*args, **kwargs)
            computed[key] = output, evaluation.buffers[start:]
        else:
            for _ in computed[key][1]:
                evaluation.next_buffer()
        output, buffers = computed[key]
        by_block.append(buffers)
        return output

    blocks = [submodule(installed.module, path) for path in blocks_of(installed)]
    undo = [intercept_calls(block, partial(around, block)) for block in blocks]
    evaluation.begin(None)
    try:
        with installed.session.evaluating(evaluation), torch.no_grad():
            installed.module(*args, **kwargs)
    finally:
        undo_all(undo)
    of_blocks = {id(buffer) for buffers in by_block for buffer in buffers}
    others = [buffer for buffer in evaluation.buffers if buffer.tensors and id(buffer) not in of_blocks]
    return BufferCounts(by_block, others)


def count_without_storage(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, patches: int) -> BufferCounts:
    """Count the same with a new model of the class, configuration and dtype of `module`, on tensors without storage.

    Args: args, kwargs: arguments of `module.forward`.
    Raises: any exception of the model, for example if its forward reads the value of a tensor.
    """
    with fake_tensors() as convert, default_dtype(module.dtype), device_of(args, kwargs):
        model: nn.Module = type(module).from_config(module.config).eval()
        new = parallelize(model, ContextParallelConfig(), kernel="math", check_peers="off", groups=SINGLE_RANK)
        args, kwargs = replace(Tensor, convert, (args, kwargs))
        return count_buffers(new, args, kwargs, patches=patches)


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device of a model's tokens: that of the largest argument."""
    return max(of_type(Tensor, (args, kwargs)), key=Tensor.numel).device


@dataclass(eq=False)
class BufferMemory:
    """Compares the buffers of this rank's blocks with the free memory of its device.

    Attributes:
        blocks: indices of this rank's blocks; None: all.
        patches: number of patches, for the error.
        needed: bytes of the buffers of one branch of guidance, by the shapes of the arguments; None: they cannot be
            counted, because the model's forward reads the values of tensors.
    """

    installed: Installed
    blocks: range | None
    patches: int
    needed: dict[Hashable, int | None] = field(default_factory=dict)
    _is_checked: bool = False

    @property
    def paths(self) -> list[str]:
        """Paths of this rank's blocks."""
        paths = blocks_of(self.installed)
        return paths if self.blocks is None else [paths[i] for i in self.blocks]

    @property
    def first_block(self) -> nn.Module:
        """The first of this rank's blocks, which calls `check_filled`."""
        return submodule(self.installed.module, self.paths[0])

    def check(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], *, branches: int = 1) -> None:
        """Check, before the first evaluation of a branch of guidance, that its buffers fit.

        Args: key: identifies the shapes of the arguments. branches: number of branches that are to fit.
        Ranks: all of the context group. Raises: PlanError: on one of these ranks they do not fit; the same on all.
        """
        if key not in self.needed:
            forget_oldest(self.needed)
            self.needed[key] = self._count(args, kwargs)
        needed = self.needed[key]
        self._is_checked = needed is not None
        if needed is not None:
            self._compare(needed, device_of(args, kwargs), branches)

    def check_filled(self, first: Sequence[Buffer]) -> None:
        """Check it in the first evaluation of a branch, if `check` could not.

        Args: first: the buffers that the first of this rank's blocks has filled.
        Ranks, raises: see `check`.
        """
        tensors = [x for buffer in first for x in buffer.tensors]
        if not tensors or self._is_checked:
            return
        counts = [_attentions(self.installed, path) for path in self.paths]
        others = sum(x.nbytes for x in tensors) * sum(counts[1:]) // max(counts[0], 1)
        self._compare(others, tensors[0].device)

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Count the bytes of the buffers on this rank; None if the model does not run without storage."""
        try:
            counts = count_without_storage(self.installed.module, args, kwargs, patches=self.patches)
        except Exception:
            return None
        if len(counts.blocks) != len(blocks_of(self.installed)):  # blocks were added or removed after the construction
            return None
        blocks = counts.blocks if self.blocks is None else [counts.blocks[i] for i in self.blocks]
        buffers_of_rank = [*counts.others, *(buffer for buffers in blocks for buffer in buffers)]
        return sum(_bytes_on_rank(buffer, self.installed.session.groups) for buffer in buffers_of_rank)

    def _compare(self, needed: int, device: torch.device, branches: int = 1) -> None:
        """Compare with the free memory. Ranks, raises: see `check`."""
        groups, free, text = self.installed.session.groups, free_bytes(device), None
        if free is not None and needed * branches > free:
            of = "one branch" if branches == 1 else f"{branches} branches"
            rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"
            text = (
                f"patches={self.patches}: the keys and values of {len(self.paths)} blocks of "
                f"{type(self.installed.module).__name__} on {rank} need {needed * branches / 1e9:,.2f} GB for {of} of "
                f"guidance, but {device} has {free / 1e9:,.2f} GB of free memory: use more stages (pipe), ulysses, "
                "cfg=2 or fewer samples"
            )
        problem = next((x for x in gather_objects(text, groups.context) if x is not None), None)
        if problem is not None:
            raise PlanError(problem)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, with what torch's allocator holds unused; None if it is unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return free_memory_bytes("cpu") if device.type == "cpu" else None


def _attentions(installed: Installed, block: str) -> int:
    """Count the modules of a block that attend across ranks."""
    return sum(path == block or path.startswith(f"{block}.") for path in installed.rules.attention)


def _bytes_on_rank(buffer: Buffer, groups: MeshGroups) -> int:
    """Return the bytes of a buffer on this rank. Args: buffer: if it holds keys, with the heads of all ranks."""
    if not isinstance(buffer, KeyBuffer):
        return sum(x.nbytes for x in buffer.tensors)
    heads, degree = buffer.tensors[0].shape[1], groups.context_shape[1]
    queries = heads * -(-degree // heads)  # at least one query head for each rank
    local_heads = assign_heads(queries, heads, degree, head_shares(groups))[groups.ulysses_rank].num_keys
    return sum(x.nbytes * local_heads // heads if x.shape[1] == heads else x.nbytes for x in buffer.tensors)
