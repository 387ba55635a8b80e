"""Calls that cannot be computed are refused on every rank, by name, before anything can hang."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp import apply_context_parallel
from lightning_cp.attention import attend_across, context_parallel_attention
from lightning_cp.attention.call import settings_of
from lightning_cp.config import ContextParallelConfig, ParallelConfig
from lightning_cp.errors import KernelError, PeerMismatchError, PlanError, ShapeError
from lightning_cp.kernels import choice
from lightning_cp.kernels.math import MathKernel
from lightning_cp.mesh.groups import groups_for
from tests.harness import RankPool
from tests.harness.cases import in_turn
from tests.models import TINY

MODES = {"ring": (3, 1), "ring alltoall": (3, 1), "ulysses": (1, 3)}
S, H, D = 4, 6, 8


def _config(mode: str) -> ContextParallelConfig:
    ring, ulysses = MODES[mode]
    return ContextParallelConfig(ring, ulysses, rotate_method="alltoall" if "alltoall" in mode else "allgather")


def _arguments(mode: str) -> dict[str, Any]:
    q, k, v = (torch.randn(2, S, H, D) for _ in range(3))
    return {"query": q, "key": k, "value": v, "parallel_config": _config(mode)}


def _mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(shape, dtype=dtype)


Change = Callable[[dict[str, Any]], None]


def _set(**values: Any) -> Change:
    return lambda arguments: arguments.update(values)


def _to(name: str, function: Callable[[Tensor], Tensor]) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = function(arguments[name])

    return change


def _both(*names: str, function: Callable[[Tensor], Tensor]) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        for name in names:
            arguments[name] = function(arguments[name])

    return change


# name: (what is done to good arguments, the error, what its message says). By name, since workers look it up.
BAD: dict[str, tuple[Change, type[Exception], str]] = {
    "dropout": (_set(dropout_p=0.1), ValueError, "dropout_p=0.1"),
    "three dims": (_to("query", lambda x: x[0]), ShapeError, "batch, seq_local, heads, head_dim"),
    "key heads without gqa": (_both("key", "value", function=lambda x: x[:, :, :3]), ShapeError, "enable_gqa=True"),
    "batch": (_both("key", "value", function=lambda x: x[:1]), ShapeError, "batch"),
    "head size": (_both("key", "value", function=lambda x: x[..., :4]), ShapeError, "head_dim"),
    "value shape": (_to("value", lambda x: x[:, :2]), ShapeError, "same shape"),
    "mixed dtypes": (_to("key", Tensor.double), ShapeError, "torch.float64"),
    "integers": (_both("query", "key", "value", function=Tensor.int), ShapeError, "torch.int32"),
    "mask of 3 dims": (_set(attn_mask=_mask(2, S, S)), ShapeError, r"attn_mask \(2, 4, 4\)"),
    "mask batch": (_set(attn_mask=_mask(3, S)), ShapeError, r"attn_mask \(3, 4\)"),
    "mask batch 4d": (_set(attn_mask=_mask(3, 1, 1, S)), ShapeError, r"attn_mask \(3, 1, 1, 4\)"),
    "mask heads": (_set(attn_mask=_mask(2, 2, 1, S)), ShapeError, r"attn_mask \(2, 2, 1, 4\)"),
    "mask keys": (_set(attn_mask=_mask(2, S - 1)), ShapeError, r"attn_mask \(2, 3\)"),
    "mask columns": (_set(attn_mask=_mask(2, 1, S, 3 * S - 1)), ShapeError, "attn_mask"),
    "mask rows": (_set(attn_mask=_mask(2, 1, S - 1, 3 * S)), ShapeError, "attn_mask"),
    "mask rows of local keys": (_set(attn_mask=_mask(2, 1, S, S)), ShapeError, "attn_mask"),
    "mask of integers": (_set(attn_mask=_mask(2, S, dtype=torch.int64)), ShapeError, "torch.int64"),
    "mask that requires grad": (
        lambda arguments: arguments.update(attn_mask=torch.zeros(2, S, requires_grad=True)),
        ShapeError,
        "requires grad",
    ),
    "no query": (_set(query=None), TypeError, "query must be a torch.Tensor, not NoneType"),
    "a list as mask": (_set(attn_mask=[1, 0]), TypeError, "attn_mask must be a torch.Tensor, not list"),
    "causal as text": (_set(is_causal="no"), TypeError, "is_causal='no'"),
    "scale as text": (_set(scale="big"), TypeError, "scale='big'"),
    "infinite scale": (_set(scale=float("inf")), ValueError, "scale=inf"),
    "no head size": (_both("query", "key", "value", function=lambda x: x[..., :0]), ShapeError, "head_dim"),
    "one int as lengths": (_set(q_lengths=S), TypeError, "q_lengths=4"),
    "query lengths count": (_set(q_lengths=[S, S], kv_lengths=[S] * 3), ShapeError, r"q_lengths=\[4, 4\]"),
    "key lengths count": (_set(q_lengths=[S] * 3, kv_lengths=[S] * 4), ShapeError, r"kv_lengths=\[4, 4, 4, 4\]"),
    "lengths of others": (_set(q_lengths=[S] * 3, kv_lengths=[S + 1] * 3), ShapeError, "kv_lengths"),
    "negative lengths": (_set(q_lengths=[S, -S, S], kv_lengths=[S] * 3), ShapeError, "q_lengths"),
    "lengths that are no ints": (_set(q_lengths=[4.0] * 3), TypeError, "q_lengths"),
    "config": (_set(parallel_config={"ring_degree": 3}), TypeError, "parallel_config"),
    "config without context": (_set(parallel_config=ParallelConfig()), ValueError, "context_parallel_config"),
    "degrees above the world": (_set(parallel_config=ContextParallelConfig(2, 2)), ValueError, "world size is 3"),
    "degrees that do not divide it": (_set(parallel_config=ContextParallelConfig(2)), ValueError, "must divide"),
}
# Those that one rank sees in its own tensors, and the others do not.
OF_ONE_RANK = [name for name in BAD if not any(word in name for word in ("config", "degrees", "lengths"))]


def _refusal(arguments: dict[str, Any]) -> tuple[list[str], str]:
    """Names of the error's type and its bases, and its message."""
    try:
        context_parallel_attention(**arguments)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return ["no error"], ""


def _bad_on_all(rank: int, world: int, mode: str) -> dict[str, tuple[list[str], str]]:
    answers = {}
    for name, (change, _, _) in BAD.items():
        arguments = _arguments(mode)
        change(arguments)
        answers[name] = _refusal(arguments)
    return answers


def _bad_on_one(rank: int, world: int, mode: str, bad_rank: int) -> dict[str, tuple[list[str], str]]:
    answers = {}
    for name in OF_ONE_RANK:
        arguments = _arguments(mode)
        if "mask" in name:
            arguments["attn_mask"] = _mask(2, S)
        if rank == bad_rank:
            BAD[name][0](arguments)
        answers[name] = _refusal(arguments)
    for name, lengths in (("q_lengths", [S, S]), ("q_lengths", [S + 1] * 3), ("kv_lengths", [S + 1] * 3)):
        arguments = _arguments(mode)  # the other lengths are not given, so that sizes are exchanged
        arguments[name] = lengths if rank == bad_rank else [S] * 3
        answers[f"{name}={lengths}"] = _refusal(arguments)
    return answers


@pytest.mark.parametrize("mode", MODES)
def test_bad_input_on_all_ranks_is_refused_on_all_ranks(run_ranks: RankPool, mode: str) -> None:
    for rank, answers in enumerate(run_ranks(3, _bad_on_all, mode)):
        for name, (kinds, message) in answers.items():
            _, kind, text = BAD[name]
            assert kind.__name__ in kinds, f"rank {rank}: {name}: {kinds}: {message}"
            assert re.search(text, message), f"rank {rank}: {name}: {message}"


@pytest.mark.parametrize(("mode", "bad_rank"), in_turn(MODES, (0, 1)))
def test_bad_input_on_one_rank_is_refused_on_every_rank(run_ranks: RankPool, mode: str, bad_rank: int) -> None:
    for rank, answers in enumerate(run_ranks(3, _bad_on_one, mode, bad_rank)):
        for name, (kinds, message) in answers.items():
            # Errors that only lengths show (a mask's last dim) are found after the exchange, by all.
            late = name in ("mask columns", "mask rows", "mask rows of local keys")
            own = BAD[name][1].__name__ if name in BAD else "ShapeError"
            expected = "ShapeError" if late else own if rank == bad_rank else "PeerMismatchError"
            assert expected in kinds, f"rank {rank}: {name}: {kinds}: {message}"


def _mismatch(rank: int, world: int, mode: str) -> list[str]:
    """Calls that are right on each rank, but not the same."""
    changes: list[Change] = [
        _set(is_causal=True),
        _set(scale=0.5),
        _set(attn_mask=_mask(2, S)),
        _both("query", "key", "value", function=lambda x: x[:1]),
        _both("query", "key", "value", function=lambda x: x[:, :, :4]),
        _both("query", "key", "value", function=Tensor.double),
        _both("query", "key", "value", function=lambda x: x[..., :4]),
    ]
    messages = []
    for change in changes:
        arguments = _arguments(mode)
        if rank == 2:
            change(arguments)
        with pytest.raises(PeerMismatchError) as caught:
            context_parallel_attention(**arguments)
        messages.append(str(caught.value))
    arguments = _arguments(mode) | {"attn_mask": _mask(2, S, dtype=torch.bool if rank else torch.float32)}
    with pytest.raises(PeerMismatchError) as caught:
        context_parallel_attention(**arguments)
    messages.append(str(caught.value))
    for known in ({}, {"q_lengths": [S] * 3, "kv_lengths": [S] * 3}):
        arguments = _arguments(mode) | {"attn_mask": _mask(2, 1, S, 3 * S) if rank else _mask(2, S)} | known
        with pytest.raises(ShapeError) as kinds:
            context_parallel_attention(**arguments)
        messages.append(str(kinds.value))
        for other in MODES.keys() - {mode}:
            groups_for(_config(other))  # on all ranks
            arguments = _arguments(other if rank == 2 else mode) | known
            with pytest.raises(PeerMismatchError, match="degrees and rotate_method"):
                context_parallel_attention(**arguments)
    return messages


@pytest.mark.parametrize("mode", MODES)
def test_calls_that_differ_between_ranks_are_refused_on_every_rank(run_ranks: RankPool, mode: str) -> None:
    answers = run_ranks(3, _mismatch, mode)
    assert all("rank 2" in message for answer in answers for message in answer[:7])
    assert answers[0] == answers[1] == answers[2]


def _few_heads(rank: int, world: int) -> str:
    q = torch.randn(1, S, 2, D)
    with pytest.raises(ShapeError) as caught:
        context_parallel_attention(q, q, q, parallel_config=ContextParallelConfig(ulysses_degree=3))
    return str(caught.value)


def test_fewer_query_heads_than_the_ulysses_degree_is_refused(run_ranks: RankPool) -> None:
    for message in run_ranks(3, _few_heads):
        assert "ulysses_degree=3" in message
        assert "must be at most the number of query heads, 2" in message


class _Picky(MathKernel):
    name = "picky"

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        return None if mask is None else "it does not support masks"


def _kernels(rank: int, world: int) -> list[str]:
    kept = choice.KERNELS, choice.KERNEL_NAMES
    choice.KERNELS, choice.KERNEL_NAMES = (*kept[0], _Picky()), (*kept[1], "picky")
    config = ContextParallelConfig(ring_degree=3)
    q, few = torch.randn(1, S, H, D), torch.randn(1, S + rank, H, D)

    def attend(q: Tensor, k: Tensor, mask: Tensor | None, *, causal: bool, kernel: str) -> None:
        name = groups_for(config).name
        settings = settings_of(D, causal=causal, scale=None, groups=name, config=config, kernel=kernel)
        attend_across(q, k, k, mask, settings, lengths=([], []))

    messages = []
    try:
        for kernel, key, mask, causal in (
            ("fastest", q, None, False),  # unknown
            ("cudnn", q, None, False),  # for another device
            ("picky", q, _mask(1, S), False),  # takes no mask
            ("picky", few, None, True),  # causal with unequal lengths: some ranks would need a mask, midway
        ):
            with pytest.raises(KernelError) as caught:
                attend(q, key, mask, causal=causal, kernel=kernel)
            messages.append(str(caught.value))
        attend(q, q, None, causal=True, kernel="picky")
        attend(few, few, None, causal=True, kernel="picky")
    finally:
        choice.KERNELS, choice.KERNEL_NAMES = kept
    return messages


def test_kernels_that_are_unknown_or_refuse_are_named_on_every_rank(run_ranks: RankPool) -> None:
    for messages in run_ranks(3, _kernels):
        assert "kernel='fastest' must be one of auto, flash" in messages[0]
        assert "kernel='cudnn' cannot be used here: it runs on cuda, not cpu" in messages[1]
        assert "it does not support masks" in messages[2]
        assert "it does not support masks" in messages[3]


def _still_right(rank: int, world: int) -> float:
    config = ContextParallelConfig(ring_degree=3)
    q = torch.randn(1, S, H, D)
    with pytest.raises((ShapeError, PeerMismatchError)):
        context_parallel_attention(q, q[:, :, : 5 + rank], q, parallel_config=config)
    out = context_parallel_attention(torch.zeros_like(q), q, torch.full_like(q, rank), parallel_config=config)
    return out.mean().item()


def test_the_call_after_a_refusal_is_right(run_ranks: RankPool) -> None:
    assert all(math.isclose(mean, 1.0, rel_tol=1e-5) for mean in run_ranks(3, _still_right))


def test_degrees_above_one_without_a_process_group_are_refused() -> None:
    q = torch.randn(1, S, H, D)
    with pytest.raises(ValueError, match="needs a process group"):
        context_parallel_attention(q, q, q, parallel_config=ContextParallelConfig(ring_degree=2))


def _whole_of_shard_length(rank: int, world: int, name: str, argument: str, ulysses: bool) -> str:
    """Pass as many positions as rank 0's shard has tokens, to all ranks."""
    model, arguments = TINY[name].build(), TINY[name].arguments()
    apply_context_parallel(model, ContextParallelConfig(*((1, world) if ulysses else (world, 1))))

    def cut(x: Tensor) -> Tensor:
        return x[: -(-len(x) // world)]

    given = arguments[argument]
    arguments[argument] = cut(given) if isinstance(given, Tensor) else tuple(map(cut, given))
    with torch.no_grad(), pytest.raises(PlanError) as caught:
        model(**arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "argument", "ulysses"),
    [("flux", "img_ids", False), ("cogvideox", "image_rotary_emb", True), ("flux", "txt_ids", True)],
)
def test_a_whole_argument_with_the_length_of_a_shard_is_refused(
    run_ranks: RankPool, name: str, argument: str, ulysses: bool
) -> None:
    for message in run_ranks(3, _whole_of_shard_length, name, argument, ulysses):
        assert f"({argument}) has " in message
        assert "were not split before: pass the whole input" in message


def _too_few_heads(rank: int, world: int) -> str:
    """Make a model parallel with more ranks than heads; nothing is computed. It stays as it was."""
    model = TINY["flux"].build()
    with pytest.raises(ShapeError) as caught:
        apply_context_parallel(model, ContextParallelConfig(ulysses_degree=6))
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    return str(caught.value)


def test_fewer_heads_than_the_ulysses_degree_are_refused_at_set_up(run_ranks: RankPool) -> None:
    for message in run_ranks(3, _too_few_heads):
        assert message.startswith("ulysses_degree=6 must be at most the number of query heads, 4, of ")
