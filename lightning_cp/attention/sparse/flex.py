"""Attention over tiles in one CUDA kernel: PyTorch's flex attention, forward and backward.

The public function has no gradient for out and LSE over several sets of keys, so its two operators are compiled here.
The mask within partial tiles is data (`Tiles.bits`), not compiled code: one compiled kernel serves all masks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_cp.attention.sparse.mask import FULL, PARTIAL
from lightning_cp.attention.sparse.tiles import CUDA_TILE, Tiles
from lightning_cp.compat.compiler import flex_operators, keep_static
from lightning_cp.kernels import Grads, PartialAttention, PartialAttentionGrad

flex_forward, flex_backward = flex_operators()

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OPTIONS = {  # those of the public function
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
_HEAD_SIZES = (16, 32, 64, 128, 256)


def is_supported(query: Tensor) -> bool:
    """Return True if the kernel computes this, and PyTorch has it under the known names."""
    return (
        query.is_cuda
        and query.dtype in _DTYPES
        and query.shape[3] in _HEAD_SIZES
        and None not in (flex_forward, flex_backward)
    )


def attend_flex(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, *, scale: float) -> PartialAttention:
    """Compute attention. Args, Returns: see `runs.attend_runs`."""
    out, lse = _compiled("forward")(*_by_head(q, k, v), scale, _tables(tiles), *_mask_of(q, tiles))
    out, lse = out.transpose(1, 2), lse.transpose(1, 2).mul(math.log(2))  # of powers of 2
    return PartialAttention(out, lse)


def attend_flex_backward(
    grad: PartialAttentionGrad, q: Tensor, k: Tensor, v: Tensor, part: PartialAttention, tiles: Tiles, *, scale: float
) -> Grads:
    """Compute gradients. Args: see `runs.attend_runs_backward`. Returns: gradients in the inputs' dtype."""
    inputs = _by_head(q, k, v, part.out.to(q.dtype), part.lse / math.log(2), grad.out.to(q.dtype))
    grad_lse = None if grad.lse is None else grad.lse.transpose(1, 2).float().mul(math.log(2)).contiguous()
    grads = _compiled("backward")(*inputs, grad_lse, scale, _tables(tiles), *_mask_of(q, tiles))
    return Grads(*(x.transpose(1, 2) for x in grads))


def _by_head(*tensors: Tensor) -> list[Tensor]:
    """Transpose [b, s, h, ...] to [b, h, s, ...]."""
    return [_with_constants(x.transpose(1, 2).contiguous(), (0, 1, 3)[: x.ndim - 1]) for x in tensors]


def _with_constants(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Make sizes of a tensor constants of compiled kernels. Lengths and numbers of tiles are none: they may change."""
    for dim in dims:
        keep_static(x, dim)
    return x


def _mask_of(q: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return `Tiles.index` and `Tiles.bits` on the device."""

    def build() -> Tensor:
        return _with_constants(tiles.index.to(q.device), (0, 1))

    return tiles.memoize("index", build), _with_constants(tiles.bits, (1, 2))


def _tables(tiles: Tiles) -> tuple[Tensor, ...]:
    """Return numbers and indices of partial and full tiles, of keys for queries and of queries for keys."""

    def build() -> tuple[Tensor, ...]:
        lists: list[Tensor] = []
        for kinds in (tiles.kinds, tiles.kinds.transpose(2, 3)):
            for kind in (PARTIAL, FULL):
                listed = (kinds == kind).int()
                order = listed.argsort(dim=-1, descending=True, stable=True).int()
                lists += [listed.sum(-1, dtype=torch.int32).contiguous(), order.contiguous()]
        return tuple(_with_constants(x.to(tiles.bits.device), (0, 1)) for x in lists)

    return tiles.memoize("tables", build)


def _same_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score


def _score_gradient(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grad: Tensor) -> list[Tensor | None]:
    return [grad, None, None, None, None]


def _attends(b: Tensor, h: Tensor, q: Tensor, k: Tensor, index: Tensor, bits: Tensor) -> Tensor:
    return bits[index[b, h, q // CUDA_TILE, k // CUDA_TILE], q % CUDA_TILE, k % CUDA_TILE]


def _of_all_heads(q: Tensor, index: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    return index.expand(q.shape[0], q.shape[1], -1, -1), bits


def _block_mask(q: Tensor, k: Tensor, tables: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return the operators' form of the mask, which differs between versions of PyTorch."""
    names = [f"{full}{of}_{what}" for of in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices")]
    lengths, size = (q.shape[2], k.shape[2]), (CUDA_TILE, CUDA_TILE)
    lists: Any = dict(zip(names, tables, strict=True))
    return BlockMask(seq_lengths=lengths, BLOCK_SIZE=size, mask_mod=_attends, **lists).as_tuple()  # type: ignore[arg-type]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, tables: tuple[Tensor, ...], *buffers: Tensor) -> Any:
    assert flex_forward is not None, "see `is_supported`"
    mask = _block_mask(q, k, tables)
    return flex_forward(q, k, v, _same_score, mask, scale, _OPTIONS, (), _of_all_heads(q, *buffers))[:2]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    scale: float,
    tables: tuple[Tensor, ...],
    *buffers: Tensor,
) -> Any:
    assert flex_backward is not None, "see `is_supported`"
    mask, graphs = _block_mask(q, k, tables), (_same_score, _score_gradient)
    return flex_backward(
        q, k, v, out, lse, grad, grad_lse, *graphs, mask, scale, _OPTIONS, (), _of_all_heads(q, *buffers)
    )[:3]


def _call_forward(*args: Any) -> Any:
    return _forward(*args)


def _call_backward(*args: Any) -> Any:
    return _backward(*args)


_FUNCTIONS = {"forward": _call_forward, "backward": _call_backward}


@functools.cache
def _compiled(name: str) -> Any:
    """Return the compiled function; compiled again for other heads and dtypes, and once for lengths that change."""
    return torch.compile(_FUNCTIONS[name], fullgraph=True)
