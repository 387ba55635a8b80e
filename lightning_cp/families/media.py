"""Convert pixels between tensors and the images that pipelines take."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def condition_image(pixels: Tensor) -> Any:
    """Return the first frames as a pipeline's `image` argument: one PIL image, or a list for several samples."""
    images = to_images(pixels)
    return images[0] if len(images) == 1 else images


def to_images(pixels: Tensor) -> list[Any]:
    """Convert the first frames of clips to PIL images, rounded to 8 bits. Args: pixels: [b, 3, f, h, w] in [-1, 1]."""
    from PIL import Image  # a dependency of diffusers' pipelines

    frames = ((pixels[:, :, 0].float() + 1) * 127.5).round().clamp(0, 255).byte()
    return [Image.fromarray(frame.permute(1, 2, 0).cpu().numpy()) for frame in frames]
