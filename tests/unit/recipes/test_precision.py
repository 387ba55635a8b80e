"""A model in Lightning's precision outside of its wrappers."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from lightning.fabric.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from typing_extensions import override

from lightning_cp.recipes.training.precision import WithPrecision


class Recording(nn.Linear):
    seen: torch.dtype

    @override
    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        self.seen = out.dtype
        return out


@pytest.mark.parametrize("name", ["32-true", "bf16-true", "bf16-mixed"])
def test_the_forward_runs_in_the_precision_and_its_result_is_float32(
    name: Literal["32-true", "bf16-true", "bf16-mixed"],
) -> None:
    precision: Precision = Precision()
    if name == "bf16-true":
        precision = HalfPrecision(name)
    if name == "bf16-mixed":
        precision = MixedPrecision(name, "cpu")
    inner = Recording(3, 2)
    model = WithPrecision(precision.convert_module(inner), precision)
    out = model(torch.ones(4, 3))
    assert inner.seen == (torch.float32 if name == "32-true" else torch.bfloat16)
    assert (out.dtype, torch.get_default_dtype()) == (torch.float32, torch.float32)
