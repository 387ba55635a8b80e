"""Activation checkpointing that saves what attention gives: backward redoes a block, but no attention or collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lightning_cp.attention.operator  # noqa: F401 - registers the operator that is saved

save_attention = partial(create_selective_checkpoint_contexts, [torch.ops.lightning_cp.attention.default])
"""A `context_fn` for `torch.utils.checkpoint.checkpoint` in code of your own."""


def selective_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a block that is done again in backward, all but its attention.

    Of each attention is kept what its backward needs anyway: output and log-sum-exp, with Ulysses the exchanged
    queries, keys and values too. For any diffusers transformer:

        transformer.enable_gradient_checkpointing(gradient_checkpointing_func=selective_checkpoint)

    Returns: what the function returns.
    """
    return checkpoint(function, *args, use_reentrant=False, context_fn=save_attention, **kwargs)
