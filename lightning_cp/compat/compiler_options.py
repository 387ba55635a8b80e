"""Set the process-wide options of `torch.compile` that exact context parallelism needs.

The options hold for everything that the process compiles afterwards. They cannot be limited to one model: the user
calls `torch.compile`, and inductor reads its options only after it has traced our operators. Nothing is imported or set
before the first use, so that a process that compiles nothing keeps PyTorch's defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_cp.compat.torch_names import dynamo_is_imported, imported_config

_GRAPHS = 64  # of one function; PyTorch's own limit is 8


def keep_order_of_attentions() -> None:
    """Set `torch._inductor.config.reorder_for_peak_memory = False`: no reordering of independent attentions by size.

    Called while an attention is traced. Ranks with uneven shards would otherwise call independent attentions in
    different orders, so that their collectives would not match. Registering an ordered effect does not prevent that.
    """
    config = imported_config("inductor")
    if config is not None:
        config.reorder_for_peak_memory = False  # type: ignore[attr-defined]


def compile_blocks_whole() -> None:
    """Set `torch._dynamo.config.optimize_ddp = False`: no split of graphs in a DDP module at gradient buckets.

    Called by selective activation checkpointing. Dynamo cannot split a selectively checkpointed block, and each block
    already has a separate graph.
    """
    config = imported_config("dynamo")
    if config is not None and config.optimize_ddp:  # every block calls this: write only once
        config.optimize_ddp = False  # type: ignore[attr-defined]


def allow_graphs_of_lengths() -> None:
    """Raise `torch._dynamo.config.recompile_limit` to 64, for many numbers of tokens.

    Called before each forward of a parallel model. Equal blocks share their graphs, but without dynamic shapes, each
    number of tokens needs its own. After PyTorch's limit of 8, blocks would run eager, or fail with `fullgraph=True`.
    """
    config = imported_config("dynamo")
    if config is not None and config.recompile_limit < _GRAPHS:
        config.recompile_limit = _GRAPHS  # type: ignore[attr-defined]


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude `function` from dynamo, also if dynamo compiles single frames after a graph break."""
    if not dynamo_is_imported():
        return function
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled
