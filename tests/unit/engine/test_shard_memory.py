"""A forward without gradients on one rank keeps the tokens of no block but the last."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, apply_context_parallel
from tests.models.wan import WAN


@torch.no_grad()
def test_one_rank_frees_the_tokens_of_each_block() -> None:
    from diffusers import WanTransformer3DModel

    model: Any = WanTransformer3DModel(**{**WAN, "num_layers": 4}).eval()
    apply_context_parallel(model, ContextParallelConfig())
    alive: list[int] = []

    def after(_: nn.Module, __: object, output: Tensor) -> None:
        alive.append(sum(type(x) is Tensor and x.shape == output.shape for x in gc.get_objects()))

    for block in model.blocks:
        block.register_forward_hook(after)
    model(torch.randn(1, 4, 3, 6, 10), torch.tensor([4]), torch.randn(1, 7, 16))
    assert len(alive) == 4
    assert alive[-1] <= alive[1], alive
