"""Convert pixels between tensors and the images that pipelines take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


def condition_image(pixels: Tensor) -> Image | list[Image]:
    """Return the first frames as a pipeline's `image` argument: one PIL image, or a list for several samples."""
    images = to_images(pixels)
    return images[0] if len(images) == 1 else images


def to_images(pixels: Tensor) -> list[Image]:
    """Convert the first frames of clips to PIL images, rounded to 8 bits. Args: pixels: [b, 3, f, h, w] in [-1, 1]."""
    return [clip[0] for clip in to_clips(pixels[:, :, :1])]


def to_clips(pixels: Tensor) -> list[list[Image]]:
    """Convert clips to lists of PIL images, rounded to 8 bits. Args: pixels: [b, 3, f, h, w] in [-1, 1]."""
    from PIL.Image import fromarray  # a dependency of diffusers' pipelines

    clips = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 4, 1).cpu().numpy()
    return [[fromarray(frame) for frame in clip] for clip in clips]
