"""A small model of text and images whose blocks call flex attention, by several names."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from lightning_cp import SparseMask
from lightning_cp.plans import LOCAL, Plan, split

TEXT, IMAGE, CONTEXT, WIDTH, HEADS = 7, 15, 6, 24, 4

ATTENTION = {"image": split(1, "image"), "text": split(1, "text")}
PLAN = Plan(
    {"blocks": ATTENTION},
    {"proj_out": split(1, "image")},
    inputs=ATTENTION,
    attention={"blocks": ("text", "image"), "cross": LOCAL},
)


def joint(shift: int = 0) -> Any:
    """A mask_mod of [text | image]: text attends to text, images to text and to near images."""

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = (q - k).abs() <= 3 + shift
        return torch.where(q < TEXT, (k < TEXT) & (k % 3 != 1) | (q == k), (k < TEXT - 2) | (near & (k >= TEXT)))

    return visible


def crossing(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Images attend to some tokens of the context."""
    return (q + k) % 3 > 0


def block_mask(mask_mod: Any, queries: int, keys: int) -> BlockMask:
    """A table of small blocks for a mask_mod."""
    mask: BlockMask = create_block_mask(mask_mod, None, None, queries, keys, device="cpu", BLOCK_SIZE=4)
    return mask


def dense(mask: Any) -> Tensor:
    """The same mask for F.scaled_dot_product_attention."""
    lengths = mask.lengths if isinstance(mask, SparseMask) else mask.seq_lengths
    q, k = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    visible: Tensor = mask.mask_mod(torch.tensor(0), torch.tensor(0), q, k)
    return visible.expand(lengths)


def compiled() -> Any:
    """The file with the compiled function. Its import takes seconds, because it loads the compiler."""
    return importlib.import_module("tests.dist.engine.compiled_flex")


def attend(way: str, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Attention of [b, h, s, d] by a block mask, or in one process by a dense one."""
    scale, grouped = 0.3, k.shape[1] < q.shape[1]
    if isinstance(mask, Tensor) and way == "lse":
        scores = (q @ k.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v * scores.logsumexp(-1, keepdim=True)
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)
    if way == "dispatch":
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        tokens_first = (x.transpose(1, 2) for x in (q, k, v))
        found: Tensor = dispatch_attention_fn(*tokens_first, attn_mask=mask, scale=scale, backend="flex")
        return found.transpose(1, 2)
    if way in ("score_mod", "max_scores"):
        mod = (lambda score, b, h, q, k: score) if way == "score_mod" else None
        return flex_attention(q, k, v, mod, return_aux=AuxRequest(max_scores=True))[0]
    if way == "compiled":
        out = compiled().compiled_flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
    else:
        out = flex_attention(q, k, v, None, mask, scale, grouped, way == "lse", kernel_options={"BLOCK_M": 16})
    if isinstance(out, tuple):
        out = out[0] * out[1].unsqueeze(-1)
    assert isinstance(out, Tensor)
    return out


class Cross(nn.Module):
    """Images attend to a context that is whole on each rank."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.to_q, self.to_kv = way, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, image: Tensor, context: Tensor, mask: Any) -> Tensor:
        q, k, v = (_heads(x, HEADS) for x in (self.to_q(image), *self.to_kv(context).chunk(2, -1)))
        return attend(self.way, q, k, v, mask).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Joint attention of [text | image], and attention to the context."""

    def __init__(self, way: str, kv_heads: int) -> None:
        super().__init__()
        self.way, self.kv_heads = way, kv_heads
        self.to_q, self.to_kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH * kv_heads // HEADS)
        self.cross = Cross(way)

    def forward(self, image: Tensor, text: Tensor, context: Tensor, mask: Any, cross: Any) -> tuple[Tensor, Tensor]:
        x = torch.cat([text, image], 1)
        k, v = (_heads(x, self.kv_heads) for x in self.to_kv(x).chunk(2, -1))
        out = attend(self.way, _heads(self.to_q(x), HEADS), k, v, mask).transpose(1, 2).flatten(2)
        text, image = (x + out).tensor_split([text.shape[1]], 1)
        return image + self.cross(image, context, cross), text


class Model(nn.Module):
    """Two blocks. `run` calls a block (with activation checkpointing, for example)."""

    def __init__(self, way: str = "flex", kv_heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        if way == "compiled":
            compiled()
        self.blocks = nn.ModuleList([Block(way, kv_heads) for _ in range(2)])
        self.proj_out = nn.Linear(WIDTH, 3)
        self.run: Any = lambda block, *args: block(*args)
        self.double()

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        context: Tensor,
        mask: Any = None,
        cross: Any = None,
        return_dict: bool = True,
    ) -> tuple[Tensor]:
        for block in self.blocks:
            image, text = self.run(block, image, text, context, mask, cross)
        return (self.proj_out(image),)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def arguments(shift: int = 0, kind: str = "block mask") -> dict[str, Any]:
    """Arguments with block masks."""
    g = torch.Generator().manual_seed(1 + shift)
    masks = [(joint(shift), TEXT + IMAGE, TEXT + IMAGE), (crossing, IMAGE, CONTEXT)]
    made = [block_mask(*x) if kind == "block mask" else SparseMask.from_mask_mod(*x, block_size=4) for x in masks]
    tokens = {"image": IMAGE, "text": TEXT, "context": CONTEXT}
    tensors = {name: torch.randn(2, n, WIDTH, generator=g, dtype=torch.float64) for name, n in tokens.items()}
    return {**tensors, "mask": made[0], "cross": made[1]}


def with_dense_masks(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for one process."""
    return {**given, "mask": dense(given["mask"]), "cross": dense(given["cross"])}
