"""Stage `sparse`: attention with sparse masks, relative to attention without a mask times the area of the mask."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch
from omegaconf import DictConfig
from torch import Tensor

from lightning_cp.attention.heads import slice_heads
from lightning_cp.attention.keys import Ring, attend_keys, key_grads
from lightning_cp.attention.sparse import SparseMask
from lightning_cp.attention.sparse.local import LocalMask
from lightning_cp.attention.sparse.tiles import Tiles, attend_runs, attend_runs_backward
from lightning_cp.kernels import Grads, PartialAttention, PartialAttentionGrad
from lightning_cp.recipes.benchmarks.gpu.results import Measurement, Result
from lightning_cp.recipes.benchmarks.gpu.timing import seconds_of

RATIO_GOAL = 1.3  # for masks of whole frames
_TITLE = "Time over that of attention without a mask, times the area of the mask"
_COLUMNS = ["mask", "tokens", "ranks", "kernel calls", "area", "forward", "backward", "first call, s"]


def _documents(tokens: int, frame: int) -> Callable[..., Tensor]:
    bounds = [tokens * share // 16 // frame * frame for share in (1, 2, 4, 5, 9, 13)]
    return lambda b, h, q, k: sum((q >= x).int() - (k >= x).int() for x in bounds) == 0


MASKS: dict[str, Callable[[int, int], Callable[..., Tensor]]] = {
    "documents": _documents,
    "frames, causal": lambda tokens, frame: lambda b, h, q, k: q // frame >= k // frame,
    "frames, window of 5": lambda tokens, frame: lambda b, h, q, k: (q // frame - k // frame).abs() <= 2,
    "window of 2048 tokens": lambda tokens, frame: lambda b, h, q, k: (q - k).abs() <= 1024,
}


def sparse_times(config: DictConfig) -> Iterator[Measurement]:
    """Time forward and backward of every mask, of the whole sequence and of one rank's queries."""
    for tokens in config.sparse.lengths:
        for name in MASKS:
            for ranks in (1, config.sparse.ranks):
                yield f"{name}, {tokens} tokens, {ranks} ranks", functools.partial(_time, config, name, tokens, ranks)


def _time(config: DictConfig, name: str, tokens: int, ranks: int, result: Result) -> None:
    device, sizes = torch.device(config.device), config.attention
    frame, heads = config.sparse.frame, slice_heads(sizes.heads, sizes.heads, 1)[0]
    own = slice(tokens // ranks * (ranks // 2), tokens // ranks * (ranks // 2 + 1))  # a rank in the middle
    mask_mod = MASKS[name](tokens, frame)
    mask = SparseMask.from_mask_mod(mask_mod, tokens, device=device)
    places = torch.arange(tokens, device=device)
    rows = (mask_mod(None, None, q[:, None], places) for q in torch.split(places[own], 1024))
    area = sum(int(x.sum()) for x in rows) / (own.stop - own.start) / tokens

    def draw(count: int) -> Tensor:
        x = torch.randn(sizes.batch, count, sizes.heads, sizes.head_dim, device=device)
        return x.to(getattr(torch, sizes.dtype))

    q, k, v, grad = draw(own.stop - own.start), draw(tokens), draw(tokens), draw(own.stop - own.start)
    ring = Ring(None, 0, (tokens,), "", False, sizes.head_dim**-0.5, "auto", "allgather", True)
    expected = [seconds_of(step, device) for step in _steps(q, k, v, grad, None, ring)]
    lengths = [tokens // ranks] * ranks
    local = LocalMask(mask, lengths, lengths, rank=ranks // 2, heads=heads.query, device=device)
    for way in ("auto", "runs"):
        started = time.perf_counter()
        steps = _steps(q, k, v, grad, local.tiles(heads, range(tokens)), ring, in_runs=way == "runs")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        first = time.perf_counter() - started
        ratios = [seconds_of(step, device) / (area * least) for step, least in zip(steps, expected, strict=True)]
        cells = [name, f"{tokens:,}", str(ranks), way, f"{area:.3f}", *(f"{x:.2f}" for x in ratios), f"{first:.1f}"]
        result.add_row(_TITLE, _COLUMNS, cells)
        if way == "auto":
            has_goal = device.type == "cuda" and name.startswith("frames") and tokens == max(config.sparse.lengths)
            for which, ratio in zip(("forward", "backward"), ratios, strict=True):
                title = f"{name}, {tokens:,} tokens, {ranks} ranks, {which}: time over area × dense"
                result.add_check(title, ratio, RATIO_GOAL if has_goal else None)


def _steps(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, tiles: Tiles | None, ring: Ring, *, in_runs: bool = False
) -> tuple[Callable[[], PartialAttention | None], Callable[[], Grads | None]]:
    """Return forward and backward of one attention call, after a first call of each."""
    kernel_for, scale = functools.partial(ring.kernel_for, q), ring.scale
    forward: Callable[[], PartialAttention | None] = functools.partial(attend_keys, q, k, v, tiles, start=0, ring=ring)
    if in_runs and tiles is not None:
        forward = functools.partial(attend_runs, kernel_for, q, k, v, tiles, scale=scale)
    part = forward()
    assert part is not None, "some query attends to a key"
    grads, known = PartialAttentionGrad(grad, None), PartialAttention(part.out.contiguous(), part.lse.contiguous())
    backward: Callable[[], Grads | None] = functools.partial(
        key_grads, grads, q, k, v, known, tiles, start=0, ring=ring
    )
    if in_runs and tiles is not None:
        backward = functools.partial(attend_runs_backward, kernel_for, grads, q, k, v, known, tiles, scale=scale)
    backward()
    return forward, backward
