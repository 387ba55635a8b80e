"""Tiny transformers of diffusers with the package's example inputs: batch 2, odd token counts, real padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp import SparseMask
from lightning_cp.plans.examples import EXAMPLES

_SIZES = {"batch": 2, "text": 7, "audio": 17, "frames": 1, "height": 1, "width": 1}


@dataclass(frozen=True)
class Tiny:
    """A class of diffusers by name, a configuration with 4 heads or more, and the sizes of its inputs in latents.

    Attributes:
        inputs: arguments that differ from the class's example, in the same notation; functions get the generator.
        training: in training mode, where it computes something else.
        prepare: changes the model after it is built.
    """

    kind: str
    config: Mapping[str, Any]
    sizes: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    training: bool = False
    prepare: Callable[[Any], None] | None = None

    def but(
        self, sizes: Mapping[str, int] | None = None, inputs: Mapping[str, Any] | None = None, **config: Any
    ) -> Tiny:
        """The same with changes."""
        added = {**self.sizes, **(sizes or {})}, {**self.inputs, **(inputs or {})}
        return replace(self, config={**self.config, **config}, sizes=added[0], inputs=added[1])

    def make(self, **config: Any) -> Any:
        """The model as its class makes it, with changes of the configuration."""
        import diffusers

        return getattr(diffusers, self.kind)(**{**self.config, **config})

    def build(self) -> nn.Module:
        """The model in float64 and eval mode, with nothing left at zero."""
        torch.manual_seed(0)
        with patch("torch.empty", torch.zeros):  # some parameters keep what torch.empty found in memory
            model = self.make().double().eval()
        for parameter in model.parameters():
            if not parameter.abs().sum():
                nn.init.normal_(parameter, std=0.02)
        if self.prepare is not None:
            self.prepare(model)
        return model

    def arguments(self) -> dict[str, Any]:
        """The same inputs on every rank."""
        import diffusers

        g, example = torch.Generator().manual_seed(1), EXAMPLES[self.kind]
        defaults = {x.name: x.default for x in inspect.signature(getattr(diffusers, self.kind)).parameters.values()}
        values = example.sized({**defaults, **self.config}, {**_SIZES, **example.sizes, **self.sizes})
        return drawn(replace(example, inputs={**example.inputs, **self.inputs}), values, g)


def drawn(example: Any, values: Mapping[str, Any], g: torch.Generator) -> dict[str, Any]:
    """Example inputs with random values in float64; the last sample is padded."""

    def draw(kind: str, dims: list[int]) -> Tensor:
        match kind:
            case "time":
                return torch.rand(dims, generator=g, dtype=torch.float64)
            case "step":
                return torch.randint(0, 900, dims, generator=g)
            case "below":
                return torch.randint(0, dims[0], dims[1:], generator=g)
            case "flags":
                return torch.rand(dims, generator=g) < 0.3
            case "ones":
                return torch.ones(dims, dtype=torch.float64)
            case "mask" | "int_mask" | "float_mask":
                dtype = {"mask": torch.bool, "float_mask": torch.float64}.get(kind)
                return padding_mask((dims[1] + 1) // 2, dims[1], dims[0]).to(dtype)
            case "lengths":
                return torch.tensor([dims[1]] * (dims[0] - 1) + [(dims[1] + 1) // 2])
            case "turns":
                return torch.polar(torch.ones(dims, dtype=torch.float64), randn(g, *dims))
        assert kind == "float", kind
        return randn(g, *dims)

    made = example.make(values, draw)
    return {name: x(g) if callable(x) else x for name, x in made.items()}


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


def padding_mask(kept: int, tokens: int = 7, samples: int = 2) -> Tensor:
    """[samples, tokens]: the last sample keeps only `kept` tokens."""
    return torch.tensor([[1] * tokens] * (samples - 1) + [[1] * kept + [0] * (tokens - kept)])


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
