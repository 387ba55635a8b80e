"""Pixels, latents of a sample (a tensor, or several by name) and tokens of 2 x 2 latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

Latents = Tensor | dict[str, Tensor]  # the names of a dict and their order are the same for all samples of a family


def by_name(latents: Latents | None) -> dict[str, Tensor]:
    """Return the tensors by name; a tensor that is not in a dict has the name ""; None: an empty dict."""
    return {} if latents is None else {"": latents} if isinstance(latents, Tensor) else latents


def like(latents: Latents, named: Mapping[str, Tensor]) -> Latents:
    """Return tensors of `by_name` as a tensor, or as a dict, as `latents` is."""
    return named[""] if isinstance(latents, Tensor) else dict(named)


def main_latents(latents: Latents) -> Tensor:
    """Return the tensor that decides the number of tokens and the time: the only one, or the first of a dict."""
    return next(iter(by_name(latents).values()))


@torch.no_grad()
def latent_moments(vae: Any, pixels: Tensor, *, channels_last: bool = True) -> tuple[Tensor, Tensor]:
    """Return mode and standard deviation of the VAE's latent distribution, in the VAE's dtype.

    Latents of an autoencoder without a distribution (Sana's) are the mode, with deviation 0.

    Args:
        pixels: in [-1, 1], in the layout that the VAE takes.
        channels_last: memory format of pictures [b, 3, h, w]: that of diffusers' image processor, or of a copy. In
            another one than the pipeline's, kernels round differently.
    """
    if pixels.dim() == 4:
        format = torch.channels_last if channels_last else torch.contiguous_format
        pixels = pixels.contiguous(memory_format=format)
    encoded = vae.encode(pixels.to(device=vae.device, dtype=vae.dtype))
    if not hasattr(encoded, "latent_dist"):
        return encoded.latent, torch.zeros_like(encoded.latent)
    return encoded.latent_dist.mode(), encoded.latent_dist.std


@torch.no_grad()
def decode_latents(vae: Any, latents: Tensor) -> Tensor:
    """Decode stored "latents", [b, ...], as pixels in [0, 1], float32."""
    latents, others = latents.to(device=vae.device, dtype=vae.dtype), {}
    if vae.config.get("timestep_conditioning"):  # LTX: decoders that can remove noise; stored latents have none
        others["temb"] = torch.zeros(len(latents), device=latents.device, dtype=latents.dtype)
    pixels: Tensor = vae.decode(latents, **others, return_dict=False)[0]
    return (pixels.float() / 2 + 0.5).clamp(0, 1)


def latent_mode(vae: Any, pixels: Tensor, *, channels_last: bool = True) -> Tensor:
    """Return the mode of the VAE's latent distribution, see `latent_moments`."""
    return latent_moments(vae, pixels, channels_last=channels_last)[0]


def pack(latents: Tensor) -> Tensor:
    """Convert [b, c, h, w] or [b, c, 1, h, w] to tokens [b, h/2 · w/2, 4c], ordered by row and column.

    The values of a token are ordered by channel, row, column.
    """
    latents = latents.flatten(1, -3)
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Convert tokens [b, n, 4c] to [b, c, height, width]: the inverse of `pack`.

    The first height/2 · width/2 tokens are taken; tokens of reference pictures follow them.
    """
    b, _, values = tokens.shape
    grid = tokens[:, : height * width // 4].reshape(b, height // 2, width // 2, values // 4, 2, 2)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(b, values // 4, height, width)


def positions(rows: int, columns: int, *, device: torch.device) -> Tensor:
    """Return the (0, row, column) positions of a picture's tokens, float32 [rows · columns, 3]."""
    axes = [torch.arange(n, device=device, dtype=torch.float32) for n in (1, rows, columns)]
    return torch.cartesian_prod(*axes)


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
