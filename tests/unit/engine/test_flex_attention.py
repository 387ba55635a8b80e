"""FlexAttention is refused by name: its block masks cover the whole sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lightning_cp import ContextParallelConfig, apply_context_parallel, context_parallel_attention
from lightning_cp.engine.attention.attention_calls import calls_flex_attention
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


CALLERS = [by_name, by_module, by_path, imported_here, by_compiled, in_helper]


@pytest.mark.parametrize("function", CALLERS)
def test_a_call_is_found(function: Callable[[Tensor], object]) -> None:
    assert calls_flex_attention(function)


@pytest.mark.parametrize("function", [other, of_masks, F.silu, None])
def test_other_functions_are_left(function: object) -> None:
    assert not calls_flex_attention(function)


class Block(nn.Module):
    """Two attentions. One of them could be intercepted."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        out: Tensor = other(heads) + flex_attention(heads, heads, heads)
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


def test_a_block_that_calls_it_is_refused() -> None:
    plan = Plan({"blocks": {"x": split(1, "image")}}, {"proj_out": split(1, "image")})
    with pytest.raises(PlanError, match=r"blocks.0 calls flex_attention\. Its block masks .* cannot be split"):
        apply_context_parallel(Model(), ContextParallelConfig(), plan)


def test_a_plan_may_refuse_the_arguments_that_lead_to_it() -> None:
    plan = Plan({"blocks": {"x": split(1, "image")}}, {"proj_out": split(1, "image")}, refused={"sparse": "flex"})
    apply_context_parallel(Model(), ContextParallelConfig(), plan)


def test_a_block_mask_is_refused() -> None:
    mask: BlockMask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 8, 8, device="cpu")
    x = torch.zeros(1, 8, 2, 4)
    with pytest.raises(TypeError, match=r"attn_mask must be a torch.Tensor, not BlockMask; give a bool or additive"):
        context_parallel_attention(x, x, x, attn_mask=mask, parallel_config=ContextParallelConfig())  # type: ignore[arg-type]
