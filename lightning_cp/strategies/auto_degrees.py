"""Let a strategy choose its degrees (`degrees="auto"`): rank 0 plans before there is a process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_cp.strategies.context import ContextParallel

_GIVE = "give the degrees by hand (ring=..., ulysses=...)"
# By the precision setting: dtype of autocast, and of the weights.
AUTOCAST_OF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
DTYPE_OF = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


@dataclass(frozen=True)
class Example:
    """Input of the planner: a transformer, the arguments of one forward, and the ranks that train it.

    Attributes:
        transformer: the model, on any device.
        arguments: arguments of one forward as a tuple or a dict, with whole tensors, which may be on the meta device.
        plan: plan of the transformer.
        ranks, node_ranks: number of ranks, and of those on one node.
        data: number of data ranks; None: the planner chooses it.
        sharded: True if FSDP2 shards the weights.
        gpu: name and memory in bytes of the GPU of one rank; None: the ranks compute on CPU.
        dtype: dtype to which the weights are cast; None: they are not cast.
        autocast: dtype of `torch.autocast`; None: no autocast.
        rotate_method, mlp_tiles: see `ContextParallelStrategy`.
    """

    transformer: nn.Module
    arguments: Any
    plan: object
    ranks: int
    node_ranks: int
    data: int | None
    sharded: bool
    gpu: tuple[str, int] | None
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    rotate_method: str = "allgather"
    mlp_tiles: int | str | None = None


def propose_degrees(planner: Callable[[Example], Any], example: Callable[[], Example]) -> tuple[tuple[int, ...], str]:
    """Plan on this rank, for all ranks.

    Returns: (ring, ulysses), and the reason in one line; or (), and an error message that every rank raises.
    """
    try:
        chosen = planner(example())
    except Exception as error:  # other ranks wait for the proposal
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return (), f"degrees='auto' found no degrees: {kind}{error}"
    return (chosen.ring, chosen.ulysses), chosen.reason


def example_of(
    module: nn.Module | None, context: ContextParallel, *, strategy: Any, ranks: int, sharded: bool
) -> Example:
    """Return the first transformer of a module, with the arguments in `module.example_input_array`.

    Raises: ValueError: the module, its transformer or the arguments are missing.
    """
    if module is None:
        raise ValueError(
            "pass example=module to the strategy: the transformer, or a module that has it, with the arguments of the "
            f"transformer's forward in module.example_input_array. Or {_GIVE}"
        )
    arguments = getattr(module, "example_input_array", None)
    if arguments is None:
        raise ValueError(
            f"{type(module).__name__}.example_input_array is not set: set it to the arguments of the transformer's "
            f"forward on one rank, whole, as a tuple or a dict (tensors may be on the meta device), or {_GIVE}"
        )
    selected = context.selected(module)
    if not selected:
        raise ValueError(f"{type(module).__name__} has no transformer with a plan yet: build it before, or {_GIVE}")
    device, plugin = strategy.root_device, getattr(strategy, "precision_plugin", None) or strategy.precision
    is_gpu = device.type == "cuda"
    transformer, plan = selected[0]
    return Example(
        transformer,
        arguments,
        plan,
        ranks,
        strategy.num_processes,
        None if context.settings.data_parallel == "auto" else int(context.settings.data_parallel),
        sharded,
        (torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory) if is_gpu else None,
        DTYPE_OF.get(str(plugin.precision)),
        AUTOCAST_OF.get(str(plugin.precision)),
        context.settings.rotate_method,
        context.settings.mlp_tiles,
    )
