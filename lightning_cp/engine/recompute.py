"""Kinds of activation checkpointing, and the selective one: backward recomputes no attention and no collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lightning_cp.attention.operator
import lightning_cp.comm.halo
import lightning_cp.comm.shards  # noqa: F401 - they register the operators that are saved
from lightning_cp.compat.compiler_options import compile_blocks_whole
from lightning_cp.engine.offload import OffloadCheckpoint

_OPERATORS = ("attention", "gather", "sum_over_ranks", "halo_exchange")

save_attention = partial(
    create_selective_checkpoint_contexts, [getattr(torch.ops.lightning_cp, name).default for name in _OPERATORS]
)
"""A `context_fn` for `torch.utils.checkpoint.checkpoint` in code of your own."""


def selective_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block with activation checkpointing; backward recomputes all but its attention and collectives.

    Each attention keeps the tensors that its backward needs: output and LSE, with Ulysses also the exchanged queries,
    keys and values. For any diffusers transformer:

        transformer.enable_gradient_checkpointing(gradient_checkpointing_func=selective_checkpoint)

    Blocks may be compiled one by one; see `compiler_options.compile_blocks_whole`.

    Returns: result of `function`.
    """
    compile_blocks_whole()
    return checkpoint(function, *args, use_reentrant=False, context_fn=save_attention, **kwargs)


def checkpoint_blocks(model: Any, kind: str) -> None:
    """Enable a kind of activation checkpointing of a diffusers model: none, full, selective or offload."""
    functions: dict[str, Callable[[], Any]] = {
        "full": lambda: None,  # diffusers' own
        "selective": lambda: selective_checkpoint,
        "offload": OffloadCheckpoint,
    }
    if kind != "none":
        model.enable_gradient_checkpointing(gradient_checkpointing_func=functions[kind]())
