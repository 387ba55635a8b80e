"""A user's own model, without our code, and its plan in diffusers' format."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp import ContextParallelInput, ContextParallelOutput


class Block(nn.Module):
    """Self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """Two blocks of width 16; `around` calls each (a checkpoint function, say)."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(16, heads) for _ in range(2)])
        self.proj_out = nn.Linear(16, 3)
        self.around: Any = lambda block, x: block(x)

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        for block in self.blocks:
            x = self.around(block, x)
        return (self.proj_out(x),)


PLAIN_PLAN = {
    "blocks.0": {"x": ContextParallelInput(split_dim=1, expected_dims=3)},
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}
