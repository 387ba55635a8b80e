"""Calls of flex attention are found and replaced by any name; where they cannot be, they are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lightning_cp import (
    ContextParallelConfig,
    apply_context_parallel,
    context_parallel_attention,
    remove_context_parallel,
)
from lightning_cp.engine.attend import AttentionDispatcher
from lightning_cp.engine.attention.attention_calls import hides_flex_attention, makes_attention_call
from lightning_cp.errors import PlanError
from lightning_cp.plans import Plan, split

compiled = torch.compile(flex_attention, backend="eager")


def by_name(x: Tensor) -> object:
    return flex_attention(x, x, x)


def by_module(x: Tensor) -> object:
    return module.flex_attention(x, x, x)


def by_path(x: Tensor) -> object:
    return torch.nn.attention.flex_attention.flex_attention(x, x, x)


def imported_here(x: Tensor) -> object:
    from torch.nn.attention.flex_attention import flex_attention as attend

    return attend(x, x, x)


def by_compiled(x: Tensor) -> object:
    return compiled(x, x, x)


def in_helper(x: Tensor) -> object:
    return by_name(torch.relu(x))


def other(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def of_masks(x: Tensor) -> object:
    return create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 8, 8), module.create_block_mask


def in_closure(attend: Callable[..., object]) -> Callable[[Tensor], object]:
    def call(x: Tensor) -> object:
        return attend(x, x, x)

    return call


def in_default(x: Tensor, attend: Callable[..., object] = flex_attention) -> object:
    return attend(x, x, x)


part = partial(flex_attention, scale=1.0)


def in_partial(x: Tensor) -> object:
    return part(x, x, x)


CALLERS = [by_name, by_module, by_path, imported_here, by_compiled, in_helper]
HIDDEN = [in_closure(flex_attention), in_closure(compiled), in_default, in_partial]


@pytest.mark.parametrize("function", CALLERS)
def test_a_call_is_found(function: Callable[[Tensor], object]) -> None:
    assert makes_attention_call(function)
    assert not hides_flex_attention(function)


@pytest.mark.parametrize("function", HIDDEN)
def test_a_function_that_no_stand_in_replaces_is_found(function: Callable[[Tensor], object]) -> None:
    assert hides_flex_attention(function)


@pytest.mark.parametrize("function", [of_masks, F.silu, None])
def test_other_functions_are_left(function: object) -> None:
    assert not makes_attention_call(function)
    assert not hides_flex_attention(function)


class Block(nn.Module):
    """Attention by a function that is set later."""

    attend: Any = None

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        out: Tensor = self.attend(heads) + other(heads)
        return out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """One block and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.proj_out = nn.ModuleList([Block()]), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.proj_out(x)
        return out


PLAN = Plan({"blocks": {"x": split(1, "image")}}, {"proj_out": split(1, "image")})


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("function", CALLERS[::4])
@pytest.mark.default(1)
def test_a_block_that_calls_it_is_intercepted(function: Callable[[Tensor], object]) -> None:
    model, x = Model(), torch.ones(1, 6, 8)
    model.blocks[0].attend = function
    expected = model(x)
    apply_context_parallel(model, ContextParallelConfig(), PLAN)
    with mock.patch.object(AttentionDispatcher, "flex", autospec=True, side_effect=AttentionDispatcher.flex) as flex:
        assert torch.allclose(model(x), expected, atol=1e-6)
        assert flex.call_count == 1
    remove_context_parallel(model)
    with mock.patch.object(AttentionDispatcher, "flex") as flex:
        assert torch.allclose(model(x), expected, atol=1e-6)
        assert flex.call_count == 0


@pytest.mark.parametrize("function", HIDDEN)
def test_a_block_that_hides_it_is_refused(function: Callable[[Tensor], object]) -> None:
    model = Model()
    model.blocks[0].forward = function
    with pytest.raises(PlanError, match=r"blocks.0 holds flex_attention in a closure, a default argument or a partial"):
        apply_context_parallel(model, ContextParallelConfig(), PLAN)


def test_a_block_mask_is_refused() -> None:
    mask: BlockMask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 8, 8, device="cpu")
    x = torch.zeros(1, 8, 2, 4)
    with pytest.raises(TypeError, match=r"attn_mask must be a torch.Tensor, not BlockMask; give a bool or additive"):
        context_parallel_attention(x, x, x, attn_mask=mask, parallel_config=ContextParallelConfig())  # type: ignore[arg-type]
