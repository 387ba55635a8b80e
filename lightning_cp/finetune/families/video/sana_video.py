"""Sana-Video: text to video, with the autoencoder of Wan or of LTX-2.

Text and its instruction are those of Sana. The transformer takes unpacked latents and times in [0, 1000].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *
from lightning_cp.finetune.families.image.sana import Sana

_PLAIN = (list, tuple)


class SanaVideo(Sana):
    """Sana-Video, text to video."""

    name = "sana_video"
    pipelines = ("SanaVideoPipeline",)
    takes_video = True
    default_frames = 81

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        statistics = {name: _statistics(pipe.vae, name) for name in ("latents_mean", "latents_std")}
        return {
            "spatial": pipe.vae_scale_factor_spatial,
            "temporal": pipe.vae_scale_factor_temporal,
            "patch": list(pipe.transformer.config.patch_size),
            **statistics,
            "text_length": call_default(pipe, "max_sequence_length"),
            "instruction": list(call_default(pipe, "complex_human_instruction")),
            "timestep_scale": 1.0,
            "shift": shift_facts(pipe.scheduler),
        }

    @property
    @override
    def grid(self) -> Grid:
        return Grid.of_clips(self.facts)

    @override
    def clean(self, stored: Stored, noise: Any = None) -> Tensor:
        latents = stored["latents"].float()
        mean, std = (per_channel(self.facts[name], latents) for name in ("latents_mean", "latents_std"))
        return (latents - mean) * (1.0 / std)

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {**super().call_arguments(media), "frames": media["pixels"].shape[2]}


def _statistics(vae: Any, name: str) -> list[float]:
    """Return a statistic of each channel: a value of Wan's config, or a buffer of LTX-2's autoencoder."""
    values = vae.config.get(name)
    if not isinstance(values, _PLAIN):
        values = getattr(vae, name, None)
    if values is None:
        raise FamilyError(
            f"sana_video: the VAE is a {type(vae).__name__}, which has no {name}: use a pipeline with the autoencoder "
            "of Wan or of LTX-2"
        )
    return [float(x) for x in values]
