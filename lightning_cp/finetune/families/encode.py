"""Encode pixels with a VAE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def latent_moments(vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return mode and standard deviation of the VAE's latent distribution, in the VAE's dtype.

    Latents of an autoencoder without a distribution (Sana's) are the mode, with deviation 0.

    Args: pixels: in [-1, 1], in the layout that the VAE takes.
    """
    if pixels.dim() == 4:  # the memory format of diffusers' image processor; in another one, kernels round differently
        pixels = pixels.contiguous(memory_format=torch.channels_last)
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


def latent_mode(vae: Any, pixels: Tensor) -> Tensor:
    """Return the mode of the VAE's latent distribution, see `latent_moments`."""
    return latent_moments(vae, pixels)[0]
