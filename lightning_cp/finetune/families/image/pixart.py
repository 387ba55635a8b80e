"""PixArt-Sigma: text to image, trained to predict the noise at integer times.

The transformer returns twice the channels of the latents: the noise, and a variance that is not trained here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *


class PixArtSigma(MaskedTextPictures):
    """PixArt-Sigma. Captions are not cleaned: the result of `clean_caption` depends on the packages installed."""

    name = "pixart_sigma"
    pipelines = ("PixArtSigmaPipeline",)
    lora_targets = ()

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        config = pipe.transformer.config
        conditions = config.use_additional_conditions
        if config.sample_size == 128 if conditions is None else conditions:
            raise FamilyError(
                f"{cls.name} takes no resolution and aspect ratio, but the transformer has use_additional_conditions="
                f"{conditions} and sample_size={config.sample_size}: it is a transformer of PixArt-Alpha"
            )
        return {**super().read_facts(pipe), "schedule": diffusion_facts(pipe.scheduler)}

    @property
    @override
    def objective(self) -> ObjectiveDefaults:
        return diffusion_defaults(self.facts["schedule"])

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        return self.encoded(pipe, captions, clean_caption=False)

    @override
    def inputs(self, noisy: Any, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        conditions = {"resolution": None, "aspect_ratio": None}
        return {**super().inputs(noisy, times, stored, options), "added_cond_kwargs": conditions}

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {**super().call_arguments(media), "clean_caption": False}
