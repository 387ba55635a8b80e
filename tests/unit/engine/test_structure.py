"""Changes that the comparison before each forward notices."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.engine.structure import Structure
from lightning_cp.plans import Plan, split


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.single_blocks, self.proj_out = nn.ModuleList([Block()]), nn.ModuleList(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.single_blocks]:
            x = block(x)
        out: Tensor = self.proj_out(x)
        return out


def test_a_block_appended_to_an_empty_list_is_noticed() -> None:
    model = Model()
    plan = Plan({"blocks": {"x": split(1, "image")}}, {"proj_out": split(1, "image")})
    apply_context_parallel(model, ContextParallelConfig(), plan)
    model(torch.zeros(1, 4, 8))
    structure = model.__dict__["_lightning_cp"]._structure
    assert isinstance(structure, Structure)
    assert structure.is_unchanged_eagerly()
    model.single_blocks.append(Block())
    assert not structure.is_unchanged_eagerly()
