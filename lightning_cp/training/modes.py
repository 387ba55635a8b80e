"""Contexts for parts of a run: modules in eval mode, and training without cuDNN's attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set eval mode inside the context, and restore the mode of every submodule after it."""
    were_training = [inner for inner in module.modules() if inner.training]
    module.eval()
    try:
        yield
    finally:
        for inner in were_training:
            inner.training = True


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Let `F.scaled_dot_product_attention` choose another kernel than cuDNN's; run forward and backward in the context.

    With torch 2.11 and later, it prefers cuDNN on Hopper and Blackwell in half precision. PyTorch keeps a graph of the
    backward for the strides of q, k and v only, so the gradient of a block can be read with the strides of another
    block: FLUX gets wrong gradients, without an error (docs/cuda.md). Attention of a parallel model is not affected: it
    calls kernels itself, and the kernel `cudnn` makes gradients contiguous.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
