"""Modules, classes and functions exchanged anywhere in a block after `apply_context_parallel`: followed, or refused."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.errors import InterceptionError, PlanError
from tests.dist.compare import averaged, outcome, worst
from tests.faults.engine.patched_parts import FOLLOWED, PLAN, REFUSED, attend, build
from tests.harness import RankPool
from tests.harness.cases import in_turn
from tests.models.wan import wan

_EXACT = 1e-9


def _arguments() -> dict[str, Any]:
    return {"x": torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def _followed(rank: int, world: int, how: str, names: list[str]) -> dict[str, tuple[float, float]]:
    """Errors of output and gradients by change, made to the last block."""
    return {name: _errors(world, how, name) for name in names}


def _errors(world: int, how: str, name: str) -> tuple[float, float]:
    single, model, arguments = build(), build(), _arguments()
    before, _ = outcome(single, arguments)
    FOLLOWED[name](single.blocks[1])
    expected, gradients = outcome(single, arguments)
    assert not torch.equal(before, expected), name
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
    called = torch.compile(model, backend="eager") if how == "whole" else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        outcome(called, arguments)
        FOLLOWED[name](model.blocks[1])
        out, found = outcome(called, arguments)
    found = {key.removeprefix("_orig_mod."): x for key, x in found.items()}
    remove_context_parallel(model)
    if how == "eager":
        assert torch.equal(outcome(model, arguments)[0], expected), name
    return float((out - expected).abs().max()), worst(averaged(found, world), gradients)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
def test_changes_anywhere_in_a_block_are_followed_exactly(run_ranks: RankPool, every: int) -> None:
    for errors in run_ranks(3, _followed, "eager", list(FOLLOWED)[::every]):
        assert not {name: x for name, x in errors.items() if max(x) > _EXACT}


@pytest.mark.full
@pytest.mark.parametrize(("name", "how"), in_turn(FOLLOWED, ("blocks", "whole")))
def test_changes_of_compiled_models_are_followed_exactly(run_ranks: RankPool, how: str, name: str) -> None:
    for errors in run_ranks(2, _followed, how, [name], timeout_s=120):
        assert max(errors[name]) < _EXACT


def _refused(rank: int, world: int) -> None:
    for change, message in REFUSED.values():
        model, arguments = build(), _arguments()
        apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
        outcome(model, arguments)
        change(model.blocks[1])
        for _ in range(2):  # it stays refused
            with pytest.raises((PlanError, InterceptionError), match=message):
                model(**arguments)
        remove_context_parallel(model)


def test_changes_that_hide_attention_are_refused(run_ranks: RankPool) -> None:
    run_ranks(2, _refused)


_original: Any = None  # WanAttnProcessor.__call__, which `_halved` calls


def _halved(self: Any, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = _original(self, attn, 0.5 * hidden_states, *args, **kwargs)
    return out


def _by_itself(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Attention that leaves the processor out; the cross-attention does nothing."""
    return attend(self, hidden_states) if encoder_hidden_states is None else hidden_states


def _nothing(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states


def _processors(rank: int, world: int, how: str) -> list[float]:
    """Errors of the output while a class is patched, and once it no longer is."""
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    globals()["_original"] = WanAttnProcessor.__call__
    model, arguments = wan().build(), wan().arguments()
    patched: list[Any] = {
        "call of a processor's class": [WanAttnProcessor, "__call__", _halved],
        "forward of the attention's class": [WanAttention, "forward", _by_itself],
    }[how]
    before, _ = outcome(model, arguments)
    with mock.patch.object(*patched):
        expected, _ = outcome(model, arguments)
    assert not torch.equal(before, expected)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    outcome(model, arguments)
    with mock.patch.object(*patched):
        found, _ = outcome(model, arguments)
    after, _ = outcome(model, arguments)
    return [float((found - expected).abs().max()), float((after - before).abs().max())]


@pytest.mark.parametrize("how", ["call of a processor's class", "forward of the attention's class"])
def test_patches_of_classes_of_diffusers_are_followed_exactly(run_ranks: RankPool, how: str) -> None:
    for errors in run_ranks(2, _processors, how):
        assert max(errors) < _EXACT


def _refused_processors(rank: int, world: int) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttention

    model, arguments = wan().build(), wan().arguments()
    expected, _ = outcome(model, arguments)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    with mock.patch.object(WanAttention, "forward", _nothing):
        for _ in range(2):
            with pytest.raises(InterceptionError, match=r"^blocks\.0\.attn1 ran on a shard"):
                model(**arguments)
    assert (outcome(model, arguments)[0] - expected).abs().max() < _EXACT


def test_patches_that_cannot_be_followed_are_refused_until_undone(run_ranks: RankPool) -> None:
    run_ranks(2, _refused_processors)
