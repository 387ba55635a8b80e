"""Attention problems: full tensors, each rank's shard, and the comparison with plain softmax attention."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_cp.attention import context_parallel_attention, gathered
from lightning_cp.config import ContextParallelConfig
from tests.reference import max_error, softmax_attention

MASKS = (
    "none",
    "keys",  # [b, keys_local] bool, sample 0 has one key left
    "keys 4d",  # [b, 1, 1, keys_local] bool
    "keys added",  # [b, keys_local] floats, some the least there is
    "keys heads",  # [1, h, 1, keys_local] floats
    "rank padded",  # all keys of the last rank that has some are padding
    "none left",  # sample 0 has no key
    "rows",  # [b, 1, q_local, keys] bool, with empty rows
    "rows added",  # [1, h, q_local, keys] floats, some -inf
    "one row",  # [b, 1, 1, keys] bool
    "one row heads",  # [b, h, 1, keys] bool
)


def config_of(ring: int, ulysses: int, rotate: str, **others: Any) -> ContextParallelConfig:
    """Return the settings of a mode. Args: rotate: a rotate method, or "grid 2x3" with the rows and columns."""
    method, _, grid = rotate.partition(" ")
    shape = tuple(map(int, grid.split("x"))) if grid else None
    return ContextParallelConfig(ring, ulysses, rotate_method=method, grid=shape, **others)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Problem:
    """One attention over several ranks, and how it is called.

    Attributes:
        rotate: a rotate method, or "grid 2x3" with the rows and columns.
        through: the loss depends on "out", "lse" or "both". needs: inputs that require grad.
        slice_bytes: bytes of K and V that "allgather" gathers at a time: 1 is a head.
        layout: "contiguous", "transposed" (strides of [b, h, s, d]), "sliced" (every other head) or "expanded".
    """

    ring: int
    ulysses: int
    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    rotate: str = "allgather"
    heads: int = 4
    kv_heads: int = 4
    d: int = 5
    batch: int = 2
    mask: str = "none"
    causal: bool = False
    known: bool = True
    through: str = "both"
    needs: str = "qkv"
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float64
    wide: bool = True
    scale: float | None = None
    slice_bytes: int = 4 << 20

    @property
    def config(self) -> ContextParallelConfig:
        return config_of(self.ring, self.ulysses, self.rotate, convert_to_fp32=self.wide)


@dataclass
class Whole:
    """All tokens of a problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # as given to ranks, uncut
    grad_out: Tensor
    grad_lse: Tensor


def whole(problem: Problem) -> Whole:
    """The same on every rank. Masks: keys [b or 1, 1 or h, 1, keys], rows [..., queries or 1, keys]."""
    p, gen = problem, torch.Generator().manual_seed(7)
    sq, sk, dtype = sum(p.q_lengths), sum(p.kv_lengths), p.dtype

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)

    q, k, v = randn(p.batch, sq, p.heads, p.d), randn(p.batch, sk, p.kv_heads, p.d), randn(p.batch, sk, p.kv_heads, p.d)
    if p.layout == "expanded":
        q, k, v = (x[:1, :, :1].expand_as(x) for x in (q, k, v))
    grads = randn(p.batch, sq, p.heads, p.d), randn(p.batch, sq, p.heads).to(torch.promote_types(dtype, torch.float32))
    return Whole(q, k, v, _mask(p, gen, sq, sk), *grads)


def _mask(p: Problem, gen: torch.Generator, sq: int, sk: int) -> Tensor | None:
    def chance(*shape: int) -> Tensor:
        return torch.rand(shape, generator=gen) > 0.4

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(p.dtype)

    b, h = p.batch, p.heads
    if p.mask == "none":
        return None
    if p.mask in ("keys", "keys 4d", "rank padded", "none left"):
        mask = chance(b, 1, 1, sk)
        if p.mask == "rank padded":
            mask[:] = True
            last = max((i for i, length in enumerate(p.kv_lengths) if length), default=0)
            mask[..., sum(p.kv_lengths[:last]) : sum(p.kv_lengths[: last + 1])] = False
        elif sk:
            mask[0] = False
            mask[0, ..., sk // 2] = p.mask != "none left"
        return mask
    if p.mask == "keys added":
        return floats(b, 1, 1, sk).masked_fill(~chance(b, 1, 1, sk), torch.finfo(p.dtype).min)
    if p.mask == "keys heads":
        return floats(1, h, 1, sk).masked_fill(~chance(1, h, 1, sk), -torch.inf)
    if p.mask == "rows":
        mask = chance(b, 1, sq, sk)
        mask[:, :, ::3] = False
        return mask
    if p.mask == "rows added":
        return floats(1, h, sq, sk).masked_fill(~chance(1, h, sq, sk), -torch.inf)
    return chance(b, 1 if p.mask == "one row" else h, 1, sk)


def cut(problem: Problem, rank: int) -> tuple[slice, slice]:
    """This rank's queries and keys."""
    starts_q, starts_k = ([0, *accumulate(x)] for x in (problem.q_lengths, problem.kv_lengths))
    return slice(starts_q[rank], starts_q[rank + 1]), slice(starts_k[rank], starts_k[rank + 1])


def local_mask(problem: Problem, mask: Tensor | None, rank: int) -> Tensor | None:
    """Return the mask that this rank passes."""
    if mask is None:
        return None
    queries, keys = cut(problem, rank)
    if problem.mask in ("keys", "keys added", "none left"):
        return mask[:, 0, 0, keys]
    if problem.mask in ("keys 4d", "keys heads", "rank padded"):
        return mask[..., keys]
    return mask if problem.mask.startswith("one row") else mask[:, :, queries]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return a copy of `x` with different strides."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        return x.repeat_interleave(2, 2)[:, :, ::2]
    if layout == "expanded":
        return x[:1, :, :1].contiguous().expand_as(x)
    return x.contiguous()


@dataclass
class Answer:
    """Results and gradients by name; None where an input needs none."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor | None]


def solve(problem: Problem, given: Whole, rank: int, **more: object) -> Answer:
    """Compute this rank's results with `context_parallel_attention`."""
    p, (queries, keys) = problem, cut(problem, rank)
    inputs = {"q": given.q[:, queries], "k": given.k[:, keys], "v": given.v[:, keys]}
    inputs = {name: laid_out(x, p.layout).detach().requires_grad_(name in p.needs) for name, x in inputs.items()}
    lengths = {"q_lengths": p.q_lengths, "kv_lengths": p.kv_lengths} if p.known else {}
    arguments = {
        "is_causal": p.causal,
        "scale": p.scale,
        "enable_gqa": p.heads != p.kv_heads,
        "parallel_config": p.config,
    }
    arguments |= lengths | more
    mask = local_mask(p, given.mask, rank)
    if p.through == "out":
        out = context_parallel_attention(*inputs.values(), mask, **arguments)  # type: ignore[arg-type]
        with torch.no_grad():
            _, lse = context_parallel_attention(*inputs.values(), mask, return_lse=True, **arguments)  # type: ignore
    else:
        out, lse = context_parallel_attention(*inputs.values(), mask, return_lse=True, **arguments)  # type: ignore
    _loss(p, out, lse, given.grad_out[:, queries], given.grad_lse[:, queries]).backward()
    return Answer(out.detach(), lse.detach(), {name: x.grad for name, x in inputs.items()})


def _loss(p: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> Tensor:
    finite = torch.where(lse.isinf(), 0, lse)
    return (out * grad_out).sum() * (p.through != "lse") + (
        (finite * grad_lse).sum() if p.through != "out" else torch.zeros((), dtype=out.dtype)
    )


def expect(problem: Problem, given: Whole) -> Answer:
    """Compute the full results with plain softmax attention in float64."""
    p = problem
    inputs = {name: x.detach().double().requires_grad_() for name, x in zip("qkv", (given.q, given.k, given.v))}
    mask = given.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    out, lse = softmax_attention(*inputs.values(), mask, causal=p.causal, scale=p.scale)
    loss = _loss(p, out, lse, given.grad_out.double(), given.grad_lse.double()) + 0 * sum(
        x.sum() for x in inputs.values()
    )
    loss.backward()
    return Answer(out.detach(), lse.detach(), {name: x.grad for name, x in inputs.items()})


def part_of(answer: Answer, problem: Problem, rank: int) -> Answer:
    """Return this rank's shard of the full results."""
    queries, keys = cut(problem, rank)
    cuts = {"q": queries, "k": keys, "v": keys}
    grads = {
        name: x[:, cuts[name]] if x is not None and name in problem.needs else None for name, x in answer.grads.items()
    }
    return Answer(answer.out[:, queries], answer.lse[:, queries], grads)


def errors(actual: Answer, expected: Answer) -> dict[str, float]:
    """Return the largest error of each result and gradient; infinite if only one of the two exists."""
    found = {"out": max_error(actual.out, expected.out), "lse": max_error(actual.lse, expected.lse)}
    for name, grad in expected.grads.items():
        mine = actual.grads[name]
        if grad is None or mine is None:
            found["d" + name] = 0.0 if grad is mine else torch.inf
        else:
            found["d" + name] = max_error(mine, grad)
    return found


def squared_errors(actual: Answer, expected: Answer) -> dict[str, float]:
    """Sum of squared errors of out and each gradient, to be added up over ranks."""
    pairs = {"out": (actual.out, expected.out)}
    for name, grad in expected.grads.items():
        mine = actual.grads[name]
        if grad is not None and mine is not None:
            pairs["d" + name] = (mine, grad)
    return {name: (a.double() - e).square().sum().item() for name, (a, e) in pairs.items()}


def check_exact(rank: int, world: int, problems: list[Problem], limit: float = 1e-10) -> list[str]:
    """On every rank: solve each problem. Returns: errors, in words. A problem that raises ends the list."""
    wrong = []
    for problem in problems:
        given = whole(problem)
        try:
            with mock.patch.dict(gathered.SLICE_BYTES, cpu=problem.slice_bytes):
                actual = solve(problem, given, rank)
        except Exception:
            raise AssertionError(f"{problem}\n{traceback.format_exc()}") from None
        found = errors(actual, part_of(expect(problem, given), problem, rank))
        if not max(found.values()) < limit:
            wrong.append(f"rank {rank}: {problem}: {found}")
    return wrong
