"""Train without the cuDNN kernel of `F.scaled_dot_product_attention`: its gradients can be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
