"""NABLA (Kandinsky 5 with `sparse_params`): each rank computes the means of its blocks, and all choose the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers import transformer_kandinsky
from torch import Tensor

from lightning_cp import ContextParallelConfig, SparseMask, apply_context_parallel, check_plan
from lightning_cp.engine.apply import installed_on
from lightning_cp.errors import InterceptionError, PeerMismatchError, ShapeError
from lightning_cp.pipelines.pipefusion.patches import PatchEvaluation
from tests.dist.compare import nothing_narrowed
from tests.harness import RankPool
from tests.models.modes import MODES
from tests.models.tiny import dense_flex_attention
from tests.models.videos import kandinsky5_nabla


def _check(rank: int, world: int, mode: str, shape: tuple[int, int]) -> tuple[str, list[Tensor]]:
    """What differs from one process, and the tables of all blocks: of one process, then of this one."""
    tiny, tables = kandinsky5_nabla(*shape), []
    model: Any = tiny.build()
    if mode == "replay":
        model.enable_gradient_checkpointing()
    original = transformer_kandinsky.nablaT_v2

    def choose(*args: Any, **kwargs: Any) -> Any:
        mask = original(*args, **kwargs)
        tables.append(SparseMask.from_block_mask(mask).kinds)
        return mask

    with (
        attention_backend("flex"),
        dense_flex_attention(),
        mock.patch.object(transformer_kandinsky, "nablaT_v2", choose),
    ):
        found = check_plan(model, {**tiny.arguments(), "return_dict": False}, MODES[mode](world))
    return "" if found.passed else str(found), tables


@pytest.mark.parametrize(
    ("world", "mode", "shape"),
    [(3, "ring", (1, 5)), (4, "unified", (2, 2)), (3, "rotation", (1, 5)), (3, "replay", (1, 5))],
)
@pytest.mark.default(1)
def test_all_ranks_choose_the_blocks_of_one_process(
    run_ranks: RankPool, world: int, mode: str, shape: tuple[int, int]
) -> None:
    results = run_ranks(world, _check, mode, shape)
    assert not any(differing for differing, _ in results)
    for _, tables in results:
        alone, here = tables[: len(tables) // 2], tables[len(tables) // 2 :]
        assert len(alone) == (4 if mode == "replay" else 2)  # two blocks; again in backward
        assert all(torch.equal(a, b) for a, b in zip(alone, here, strict=True))
        assert any((x[0, 0] != x[1, 1]).any() for x in alone), "samples and heads choose their own blocks"
        assert all(x.bool().float().mean() < 0.9 for x in alone)


def _compiled(rank: int, world: int) -> float:
    """The largest difference of outputs in two forwards of compiled blocks from those of eager blocks."""
    torch._dynamo.reset()
    tiny, largest = kandinsky5_nabla(), 0.0
    model: Any = tiny.build()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    given = {**tiny.arguments(), "return_dict": False}
    with torch.no_grad(), nothing_narrowed():
        expected = model(**given)[0]
        for block in model.visual_transformer_blocks:
            block.compile(backend="eager")
        for _ in range(2):
            largest = max(largest, float((model(**given)[0] - expected).abs().max()))
    return largest


@pytest.mark.full
def test_compiled_blocks_choose_the_same(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _compiled)) < 1e-12


def _refused(rank: int, world: int) -> list[str]:
    """Errors of each case."""
    model: Any = kandinsky5_nabla().build()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    installed, messages = installed_on(model), []
    assert installed is not None
    for tiny, patches, error in (
        (kandinsky5_nabla(width=2), 0, ShapeError),
        (kandinsky5_nabla(sta_mask=torch.ones(1, 1, 10, 10, dtype=torch.bool)), 0, ShapeError),
        (kandinsky5_nabla(sta_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool)), 0, ShapeError),
        (kandinsky5_nabla(width=6), 2, InterceptionError),
    ):
        evaluation = PatchEvaluation(installed.session, patches, ("image",)) if patches else None
        with (
            torch.no_grad(),
            nothing_narrowed(),
            installed.session.evaluating(evaluation),
            pytest.raises(error) as caught,
        ):
            model(**tiny.arguments())
        messages.append(str(caught.value))
    return messages


def test_too_few_blocks_and_wrong_numbers_of_blocks_are_refused_on_all_ranks(run_ranks: RankPool) -> None:
    everyones = run_ranks(3, _refused)
    assert everyones == [everyones[0]] * 3
    few, many, unequal, patches = everyones[0]
    assert "2 rows (or frames) of image tokens, fewer than the 3 ranks" in few
    assert "sta_mask is of 10 blocks, but 320 image tokens are 5 blocks of 64" in many
    assert "320 image tokens, which do not divide into 3 rows" in unequal
    assert "set patches=1" in patches


def _disagreeing(rank: int, world: int) -> str:
    original, model = transformer_kandinsky.nablaT_v2, kandinsky5_nabla().build()

    def choose(q: Tensor, k: Tensor, sta: Tensor, thr: float) -> Any:
        return original(q, k, sta, thr if rank else 1.0)

    with mock.patch.object(transformer_kandinsky, "nablaT_v2", choose), torch.no_grad(), nothing_narrowed():
        apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
        with pytest.raises(PeerMismatchError) as caught:
            model(**kandinsky5_nabla().arguments())
    return str(caught.value)


@pytest.mark.full
def test_a_rank_that_chooses_other_blocks_is_found_by_all(run_ranks: RankPool) -> None:
    assert all("mask" in message for message in run_ranks(3, _disagreeing))
