"""Tiny transformers of diffusers with inputs: batch 2, odd token counts, real padding, 4 query heads or more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp import SparseMask


@dataclass(frozen=True)
class Tiny:
    """A class of diffusers by name, a configuration, and inputs by a generator.

    training: in training mode, where it computes something else.
    """

    kind: str
    config: dict[str, Any]
    inputs: Callable[[torch.Generator], dict[str, Any]] = field(repr=False)
    training: bool = False

    def build(self) -> nn.Module:
        """The model in float64 and eval mode, with nothing left at zero."""
        import diffusers

        torch.manual_seed(0)
        with patch("torch.empty", torch.zeros):  # some parameters keep what torch.empty found in memory
            model = getattr(diffusers, self.kind)(**self.config).double().eval()
        for parameter in model.parameters():
            if not parameter.abs().sum():
                nn.init.normal_(parameter, std=0.02)
        return model

    def arguments(self) -> dict[str, Any]:
        """The same inputs on every rank."""
        return self.inputs(torch.Generator().manual_seed(1))


def with_short_text(arguments: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The same inputs with so many tokens of text; the second sample has but one."""
    short = dict(arguments)
    for name in ("encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_mask"):
        if name in short:
            short[name] = short[name][:, :tokens].clone()
            if "mask" in name:
                short[name][1, 1:] = 0
    if "txt_ids" in short:
        short["txt_ids"] = short["txt_ids"][..., :tokens, :]
    return short


def randn(g: torch.Generator, *shape: int) -> Tensor:
    """Float64 noise."""
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def padding_mask(kept: int, tokens: int = 7) -> Tensor:
    """[2, tokens]: the first sample keeps all text, the second only `kept` tokens."""
    return torch.tensor([[1] * tokens, [1] * kept + [0] * (tokens - kept)])


TIMES = torch.tensor([0.3, 0.8], dtype=torch.float64)
STEPS = torch.tensor([44, 239])


@contextmanager
def dense_flex_attention() -> Iterator[None]:
    """Context in which one process can compute flex attention with a table of whole blocks, and its gradients.

    On CPU, torch's own has no backward, and does not read the table unless it is compiled.
    """

    def flex_attention(query: Tensor, key: Tensor, value: Tensor, block_mask: Any = None, **others: Any) -> Tensor:
        mask = None
        if block_mask is not None:
            table = SparseMask.from_block_mask(block_mask)
            assert tuple(table.lengths) == (query.shape[2], key.shape[2])
            mask = table.kinds.bool().repeat_interleave(table.block_size[0], 2)
            mask = mask.repeat_interleave(table.block_size[1], 3)
        return F.scaled_dot_product_attention(query, key, value, mask)

    with patch.object(flex_module, "flex_attention", flex_attention):
        yield
