"""Activation checkpointing that saves what attention gives: backward redoes a block, but no attention or collective."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lightning_cp.attention.operator
import lightning_cp.comm.halo
import lightning_cp.comm.shards  # noqa: F401 - they register the operators that are saved

_OPERATORS = ("attention", "gather", "sum_over_ranks", "halo_exchange")

save_attention = partial(
    create_selective_checkpoint_contexts, [getattr(torch.ops.lightning_cp, name).default for name in _OPERATORS]
)
"""A `context_fn` for `torch.utils.checkpoint.checkpoint` in code of your own."""


def selective_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a block that is done again in backward, all but its attention.

    Of each attention is kept what its backward needs anyway: output and log-sum-exp, with Ulysses the exchanged
    queries, keys and values too. For any diffusers transformer:

        transformer.enable_gradient_checkpointing(gradient_checkpointing_func=selective_checkpoint)

    Blocks may be compiled one by one. (Dynamo's `optimize_ddp` is turned off for that.)

    Returns: what the function returns.
    """
    _compile_blocks_whole()
    return checkpoint(function, *args, use_reentrant=False, context_fn=save_attention, **kwargs)


def _compile_blocks_whole() -> None:
    """Tell dynamo not to split what is compiled inside a DDP module by gradient buckets: it cannot split what is
    checkpointed selectively, and each block is a graph of its own already."""
    config = sys.modules.get("torch._dynamo.config")
    if config is not None and config.optimize_ddp:  # each block calls this: written once
        config.optimize_ddp = False  # type: ignore[attr-defined]
