"""Attention between split and gather, but outside of the planned blocks: exact on whole keys, refused on shards."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.errors import InterceptionError, PlanError
from lightning_cp.plans import Plan, split
from tests.dist.compare import averaged, outcome, worst
from tests.faults.engine.patched_parts import Attending, WithDiffusers, attend
from tests.harness import RankPool

_EXACT = 1e-9
_PLAN = Plan({"blocks": {"x": split(1, "image")}}, {"proj_out": split(1, "image")})


class Block(nn.Module):
    """Attention without weights."""

    def forward(self, x: Tensor) -> Tensor:
        return x + attend(self, x)


class Model(nn.Module):
    """Blocks of attention, and modules before and after them that tests exchange. The text is whole on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Identity(), nn.ModuleList([Block(), Block()])
        self.text, self.norm_out, self.proj_out = nn.Identity(), nn.Identity(), nn.Linear(16, 3)

    def forward(self, x: Tensor, text: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = x + self.text(text).mean(1, keepdim=True)
        return (self.proj_out(self.norm_out(x)),)


class Wide(nn.Sequential):
    """The last layer, behind attention."""

    def __init__(self) -> None:
        super().__init__(Attending(), nn.Linear(16, 3).double())


def _by_model(model: Any) -> None:
    class Attends(type(model)):  # type: ignore[misc]
        def forward(self, x: Tensor, text: Tensor, return_dict: bool = True) -> tuple[Tensor]:
            for block in self.blocks:
                x = block(x)
            return (self.proj_out(attend(self, x)),)

    model.__class__ = Attends


_REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "after the blocks": (lambda model: setattr(model, "norm_out", Attending()), "^norm_out makes"),
    "of diffusers": (lambda model: setattr(model, "norm_out", WithDiffusers()), r"^norm_out\.attention makes"),
    "at the gather": (lambda model: setattr(model, "proj_out", Wide()), r"^proj_out\.0 makes"),
    "in the model's forward": (_by_model, "^the model itself makes"),
}


def _arguments(tokens: int, text: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"x": tokens, "text": text}
    return {name: torch.randn(2, n, 16, generator=generator, dtype=torch.float64) for name, n in sizes.items()}


def _refused(rank: int, world: int, before: bool, tokens: int) -> tuple[list[list[str]], bool]:
    """Errors of two forwards for each change, and whether the plan was taken off completely."""
    said, is_off = [], True
    for change, _ in _REFUSED.values():
        model, arguments, messages = Model().double(), _arguments(tokens, 4), list[str]()
        if before:
            change(model)
        attributes = set(model.__dict__)
        apply_context_parallel(model, ContextParallelConfig(ring_degree=world), _PLAN)
        if not before:
            model(**arguments)
            change(model)
        for _ in range(2):
            with pytest.raises((InterceptionError, PlanError)) as caught:
                model(**arguments)
            messages.append(str(caught.value))
        remove_context_parallel(model)
        is_off &= set(model.__dict__) == attributes
        model(**arguments)
        said.append(messages)
    return said, is_off


@pytest.mark.parametrize(("before", "tokens"), [(True, 9), (False, 11)])
def test_attention_on_shards_outside_of_the_blocks_is_refused(run_ranks: RankPool, before: bool, tokens: int) -> None:
    for said, is_off in run_ranks(3, _refused, before, tokens):
        assert is_off
        for messages, (_, pattern) in zip(said, _REFUSED.values(), strict=True):
            assert len(messages) == 2
            assert all(re.search(f"{pattern}|proj_out is another module", message) for message in messages)


def _followed(rank: int, world: int, text: int) -> tuple[float, float]:
    """Attention before the split, and over a text that is whole; the text may have as many tokens as a shard."""
    single, model, arguments = Model().double(), Model().double(), _arguments(9, text)
    for one in (single, model):
        one.embed, one.text = WithDiffusers(), Attending()
    expected, gradients = outcome(single, arguments)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), _PLAN)
    out, found = outcome(model, arguments)
    return float((out - expected).abs().max()), worst(averaged(found, world), gradients)


@pytest.mark.parametrize("text", [3, 4, 9])
def test_attention_over_whole_tokens_outside_of_the_blocks_is_exact(run_ranks: RankPool, text: int) -> None:
    for output, gradient in run_ranks(3, _followed, text):
        assert output < _EXACT
        assert gradient < _EXACT


def _compiled(rank: int, world: int) -> tuple[float, str]:
    arguments = _arguments(9, 4)
    model = Model().double()
    model.text = Attending()
    expected = model(**arguments)[0]
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), _PLAN)
    error = float((torch.compile(model, backend="eager")(**arguments)[0] - expected).detach().abs().max())
    remove_context_parallel(model)
    model.norm_out = Attending()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), _PLAN)
    with pytest.raises(Exception, match="norm_out makes an attention call") as caught:
        torch.compile(model, backend="eager", fullgraph=True)(**arguments)
    return error, str(caught.value)


@pytest.mark.full
def test_attention_outside_of_compiled_blocks_is_followed_or_refused(run_ranks: RankPool) -> None:
    for error, said in run_ranks(2, _compiled, timeout_s=240):
        assert error < _EXACT
        assert "norm_out makes an attention call outside of the plan's blocks" in said
