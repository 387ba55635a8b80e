"""Wan 2.1 and 2.2, text to video.

The transformer takes unpacked latents, times in [0, 1000] (one per sample, or per token where the pipeline expands
timesteps), and text that is filled with zeros to 512 positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *


class Wan(Family):
    """Wan, text to video.

    With two transformers (2.2 A14B), the pipeline uses `transformer` for sigma >= `facts["boundary_ratio"]` and
    `transformer_2` below. By default, each is trained on these noise levels only.
    """

    name = "wan"
    pipelines = ("WanPipeline",)
    widths = ("out_channels", "text_dim")
    components = Components(text=("text_encoder", "tokenizer"), train=("transformer", "transformer_2"))
    takes_video = True

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        transformer = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
        return {
            "spatial": pipe.vae_scale_factor_spatial,
            "temporal": pipe.vae_scale_factor_temporal,
            "patch": list(transformer.config.patch_size),
            "latents_mean": list(pipe.vae.config.latents_mean),
            "latents_std": list(pipe.vae.config.latents_std),
            "expand_timesteps": bool(pipe.config.get("expand_timesteps")),
            "boundary_ratio": pipe.config.get("boundary_ratio"),
            "text_length": 512,
            "shift": shift_facts(pipe.scheduler),
        }

    @property
    @override
    def grid(self) -> Grid:
        return Grid.of_clips(self.facts)

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("zeros", self.facts["text_length"])

    @property
    @override
    def objective(self) -> ObjectiveDefaults:
        return ObjectiveDefaults(shift=shift_from(self.facts["shift"]))

    @override
    def sigma_range(self, component: str) -> tuple[float, float]:
        boundary = self.facts.get("boundary_ratio")
        if boundary is None:
            return super().sigma_range(component)
        if not isinstance(boundary, (int, float)) or not 0 < boundary < 1:
            raise FamilyError(f"boundary_ratio={boundary!r} of the pipeline must be above 0 and below 1")
        return (0.0, float(boundary)) if component == "transformer_2" else (float(boundary), 1.0)

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        embeds, _ = pipe.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.facts["text_length"]
        )
        # The pipeline has replaced padding by zeros: cutting them off and padding again gives the same tensor.
        return [{"prompt_embeds": x[: int(x.any(dim=-1).nonzero().max()) + 1]} for x in embeds]

    @override
    def clean(self, stored: Stored, noise: Tensor | None = None) -> Tensor:
        return self.normalised(stored["latents"])

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        timestep = scheduler_times(times)
        if self.facts["expand_timesteps"]:
            timestep = timestep[:, None].repeat(1, self.grid.tokens(noisy.shape[1:]))
        return {
            "hidden_states": noisy.to(options.dtype),
            "timestep": timestep,
            "encoder_hidden_states": stored["prompt_embeds"].to(options.dtype),
            "return_dict": False,
        }

    def normalised(self, latents: Tensor) -> Tensor:
        """Normalise latents of the VAE per channel, [b, c, f, h, w], in float32."""
        mean = per_channel(self.facts["latents_mean"], latents)
        # The reciprocal, as in the pipeline: a division differs in the last bit.
        return (latents.float() - mean) * (1.0 / per_channel(self.facts["latents_std"], latents))
