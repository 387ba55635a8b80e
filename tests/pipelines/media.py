"""Pictures and videos of noise, and embeddings of prompts."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor


def image(height: int, width: int, seed: int = 1) -> Image.Image:
    """A picture of noise."""
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def video(frames: int, height: int, width: int, seed: int = 1) -> list[Image.Image]:
    """A video of noise."""
    return [image(height, width, seed * 100 + frame) for frame in range(frames)]


def embeds(kept: int, tokens: int, width: int = 16, seed: int = 1) -> Tensor:
    """Embeddings of one text: `kept` tokens of noise, then zeros up to `tokens`."""
    noise = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed))
    noise[:, kept:] = 0
    return noise


def prompt_embeds(kept: int, negative: int, tokens: int, width: int = 16) -> dict[str, Tensor]:
    """Arguments in place of a prompt and a negative prompt, for pipelines that read text only with `ftfy` installed."""
    return {
        "prompt_embeds": embeds(kept, tokens, width, seed=1),
        "negative_prompt_embeds": embeds(negative, tokens, width, seed=2),
    }
