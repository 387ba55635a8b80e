"""Encode pixels with a VAE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
