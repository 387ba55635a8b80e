"""Modules, classes and functions exchanged anywhere in a block after `apply_context_parallel`: followed, or refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.engine.apply import parallelize
from lightning_cp.engine.attention.stand_ins import original_of
from lightning_cp.errors import InterceptionError, PlanError
from lightning_cp.plans import LOCAL, Plan
from tests.dist.compare import averaged, outcome, worst
from tests.faults.engine.patched_parts import FOLLOWED, HELD, PLAN, REFUSED, Nested, attend, build, build_held, imported
from tests.harness import RankPool
from tests.models.wan import wan

_EXACT = 1e-9


def _arguments() -> dict[str, Any]:
    return {"x": torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


TABLES: dict[str, tuple[Callable[[], Any], dict[str, Callable[[Any], None]]]] = {
    "parts": (build, FOLLOWED),
    "held": (build_held, HELD),
}
Result = tuple[float, float, bool, bool]


def _followed(rank: int, world: int, table: str, how: str, when: str, names: list[str]) -> dict[str, Result]:
    """By change of the last block: errors of output and gradients; whether it changes the output, and is kept.

    Args: how: "eager"; "blocks" or "whole": what is compiled. when: "before" or "after" the plan is applied.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the compiler
        return {name: _errors(world, *TABLES[table], how, when, name) for name in names}


def _errors(world: int, make: Any, changes: Any, how: str, when: str, name: str) -> Result:
    single, model, arguments = make(), make(), _arguments()
    before, _ = outcome(single, arguments)
    changes[name](single.blocks[-1])
    single.train(name != "only in evaluation")
    expected, gradients = outcome(single, arguments)
    if when == "before":
        changes[name](model.blocks[-1])
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    for block in model.blocks if how == "blocks" else ():
        block.compile(backend="eager", fullgraph=True)
    called = torch.compile(model, backend="eager") if how == "whole" else model
    if when == "after":
        outcome(called, arguments)
        changes[name](model.blocks[-1])
    model.train(single.training)
    out, found = outcome(called, arguments)
    found = {key.removeprefix("_orig_mod."): x for key, x in found.items()}
    remove_context_parallel(model)
    is_kept = how != "eager" or torch.equal(outcome(model, arguments)[0], expected)
    error = float((out - expected).abs().max())
    return error, worst(averaged(found, world), gradients), not torch.equal(before, expected), is_kept


def _check(results: list[dict[str, Result]], names: list[str]) -> None:
    for found in results:
        assert list(found) == names
        for name, (output, gradient, changes, is_kept) in found.items():
            assert output < _EXACT, name
            assert gradient < _EXACT, name
            assert changes, name
            assert is_kept, name


@pytest.mark.parametrize(
    ("table", "when", "every"),
    [("parts", "after", 4), ("held", "after", 3), ("parts", "after", 1), ("held", "after", 1), ("held", "before", 1)],
)
@pytest.mark.default(2)
def test_changes_anywhere_in_a_block_are_followed_exactly(
    run_ranks: RankPool, table: str, when: str, every: int
) -> None:
    names = list(TABLES[table][1])[::every]
    _check(run_ranks(3, _followed, table, "eager", when, names, timeout_s=240), names)


@pytest.mark.full
@pytest.mark.parametrize(("table", "how"), [("parts", "whole"), ("held", "blocks")])
def test_changes_of_compiled_models_are_followed_exactly(run_ranks: RankPool, table: str, how: str) -> None:
    """But for the class of a helper: torch.compile itself does not notice that a function of it was replaced."""
    names = [name for name in TABLES[table][1] if name != "function of a helper's class"]
    _check(run_ranks(2, _followed, table, how, "after", names, timeout_s=400), names)


def _refused(rank: int, world: int) -> list[list[str]]:
    """Errors of two forwards after each change."""
    said = []
    for change, _ in REFUSED.values():
        model, arguments, messages = build(), _arguments(), list[str]()
        apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
        outcome(model, arguments)
        change(model.blocks[1])
        for _ in range(2):
            with pytest.raises((PlanError, InterceptionError)) as caught:
                model(**arguments)
            messages.append(str(caught.value))
        remove_context_parallel(model)
        said.append(messages)
    return said


def test_changes_that_hide_attention_are_refused_and_stay_refused(run_ranks: RankPool) -> None:
    for said in run_ranks(2, _refused):
        for messages, (_, pattern) in zip(said, REFUSED.values(), strict=True):
            assert all(re.search(pattern, message) for message in messages), messages


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


def _refused_processors(rank: int, world: int) -> tuple[list[str], float]:
    from diffusers.models.transformers.transformer_wan import WanAttention

    model, arguments = wan().build(), wan().arguments()
    expected, _ = outcome(model, arguments)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    said = []
    with mock.patch.object(WanAttention, "forward", _nothing):
        for _ in range(2):
            with pytest.raises(InterceptionError) as caught:
                model(**arguments)
            said.append(str(caught.value))
    return said, float((outcome(model, arguments)[0] - expected).abs().max())


def test_patches_that_cannot_be_followed_are_refused_until_undone(run_ranks: RankPool) -> None:
    for said, error in run_ranks(2, _refused_processors):
        assert all(message.startswith("blocks.0.attn1 ran on a shard") for message in said)
        assert error < _EXACT


class Holds:
    """A helper that holds PyTorch's own function, from before a plan was applied."""

    def __init__(self) -> None:
        self.function = original_of(F.scaled_dot_product_attention)

    def __call__(self, x: Tensor) -> Tensor:
        q = x.reshape(*x.shape[:2], 4, -1).transpose(1, 2)
        return self.function(q, q.flip(-1), q).transpose(1, 2).flatten(2)


def _by_list(items: list[Any], x: Tensor) -> Tensor:
    q = x.reshape(*x.shape[:2], 4, -1).transpose(1, 2)
    out: Tensor = items[-1](q, q.flip(-1), 0.5 * q).transpose(1, 2).flatten(2)
    return out


def _held(rank: int, world: int) -> tuple[float, bool]:
    """A model that holds the function in attributes, lists and helpers.

    Returns: the error, and whether the function is there again without a plan.
    """
    single, model, arguments = build_held(), build_held(), _arguments()
    for one in (single, model):
        block = one.blocks[0]
        block.attention.processor.function = partial(Holds.__call__, block)
        block.function, block.helper.inner = original_of(F.scaled_dot_product_attention), Holds()
        block.items[0] = partial(_by_list, block.items)
        block.items.append(original_of(F.scaled_dot_product_attention))
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    error = float((model(**arguments)[0] - single(**arguments)[0]).detach().abs().max())
    remove_context_parallel(model)
    original = original_of(F.scaled_dot_product_attention)  # models of earlier tests may be parallel
    block = model.blocks[0]
    return error, block.function is block.items[1] is block.helper.inner.function is original


def test_a_function_held_from_before_is_followed(run_ranks: RankPool) -> None:
    """In defaults and closures, it is refused: test_captured_functions.py."""
    for error, is_back in run_ranks(3, _held):
        assert error < _EXACT
        assert is_back


def _allowed(rank: int, world: int) -> float:
    """Error of a model whose LOCAL module attends in a helper: on this rank's tokens, as the plan says."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.helper = Nested(imported)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.helper(x.reshape(-1, 2, x.shape[-1])).view_as(x)  # within pairs of tokens
            return out

    single, model = build_held(), build_held()
    for one in (single, model):
        one.blocks[0].helper = Local()
    plan = Plan(PLAN.blocks, PLAN.gather, attention={"helper": LOCAL})
    x = torch.randn(2, 4 * world, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parallelize(model, ContextParallelConfig(ring_degree=world), plan)
    with torch.no_grad():
        return float((model(x)[0] - single(x)[0]).abs().max())


def test_helpers_of_local_modules_may_attend(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _allowed)) < _EXACT
