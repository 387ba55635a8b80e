"""The parts that families of pictures share: flow matching, VAE statistics, and tokens of 2 x 2 latents."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.family import (
    Facts,
    Family,
    Grid,
    InputOptions,
    Stored,
    TextStorage,
    per_channel,
    stored_latents,
)
from lightning_cp.finetune.families.latents import unpack
from lightning_cp.finetune.families.schedule import ObjectiveDefaults, shift_facts, shift_from


class Pictures(Family):
    """Flow matching on pictures, with tokens of 2 x 2 latents and text of up to 512 positions.

    Attributes:
        posterior: `mode` or `sample` of the VAE's latent distribution in training.
        statistics: names of the VAE's config values that normalise latents.
    """

    posterior: ClassVar[Literal["mode", "sample"]] = "sample"
    statistics: ClassVar[tuple[str, ...]] = ("shift_factor", "scaling_factor")

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        return {
            "pixels": 2 * pipe.vae_scale_factor,
            **{name: x if isinstance(x := pipe.vae.config[name], float) else list(x) for name in cls.statistics},
            "text_length": 512,
            "shift": shift_facts(pipe.scheduler),
        }

    @property
    @override
    def grid(self) -> Grid:
        return Grid(pixels=self.facts["pixels"], frame_step=0, patch=(1, 2, 2))

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("masked", self.facts["text_length"])

    @property
    @override
    def objective(self) -> ObjectiveDefaults:
        guidance = 1.0 if self.facts.get("guidance_embeds") else None
        return ObjectiveDefaults(shift=shift_from(self.facts["shift"]), guidance=guidance, posterior=self.posterior)

    @override
    def clean(self, stored: Stored, noise: Tensor | None = None) -> Tensor:
        return self.normalised(stored_latents(stored, noise))

    def normalised(self, latents: Tensor) -> Tensor:
        """Normalise float32 latents of the VAE, as the pipeline does."""
        if "scaling_factor" in self.facts:
            scaled: Tensor = (latents - self.facts["shift_factor"]) * self.facts["scaling_factor"]
            return scaled
        mean, std = (per_channel(self.facts[name], latents) for name in ("latents_mean", "latents_std"))
        return (latents - mean) / std

    def guidance(self, noisy: Tensor, options: InputOptions) -> Tensor | None:
        """Return the argument of the guidance embedding, float32 [b]; None if the transformer has none."""
        if not self.facts.get("guidance_embeds"):
            return None
        return torch.full([len(noisy)], options.guidance, dtype=torch.float32, device=noisy.device)

    @override
    def prediction(self, output: Any, noisy: Tensor) -> Tensor:
        height, width = noisy.shape[-2:]
        return unpack(output, height, width).view_as(noisy)
