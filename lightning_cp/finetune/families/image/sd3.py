"""Stable Diffusion 3 and 3.5, text to image.

The transformer takes unpacked latents, times in [0, 1000], and the text of three encoders without masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *


class StableDiffusion3(Family):
    """Stable Diffusion 3 and 3.5, text to image."""

    name = "sd3"
    pipelines = ("StableDiffusion3Pipeline",)
    widths = ("in_channels", "joint_attention_dim")
    components = Components(
        text=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"),
        optional=("text_encoder_3", "tokenizer_3"),
    )
    lora_targets = (*Family.lora_targets, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        return {
            "patch": pipe.transformer.config.patch_size,
            "max_positions": pipe.transformer.config.pos_embed_max_size,
            "pixels": pipe.vae_scale_factor * pipe.transformer.config.patch_size,
            "shift_factor": pipe.vae.config.shift_factor,
            "scaling_factor": pipe.vae.config.scaling_factor,
            "clip_length": pipe.tokenizer_max_length,
            "t5_length": 256,
            "shift": shift_facts(pipe.scheduler),
        }

    @property
    @override
    def grid(self) -> Grid:
        return Grid(pixels=self.facts["pixels"], frame_step=0, patch=(1, self.facts["patch"], self.facts["patch"]))

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("padded", self.facts["clip_length"] + self.facts["t5_length"], others=("pooled_embeds",))

    @property
    @override
    def objective(self) -> ObjectiveDefaults:
        return ObjectiveDefaults(shift=shift_from(self.facts["shift"]), posterior="sample")

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        embeds, _, pooled, _ = pipe.encode_prompt(
            list(captions), None, None, do_classifier_free_guidance=False, max_sequence_length=self.facts["t5_length"]
        )
        return [{"prompt_embeds": x, "pooled_embeds": y} for x, y in zip(embeds, pooled, strict=True)]

    @override
    def check_size(self, *, height: int, width: int, frames: int = 1) -> None:
        super().check_size(height=height, width=width, frames=frames)
        largest = self.facts["max_positions"] * self.facts["pixels"]
        if max(height, width) > largest:
            raise FamilyError(f"height={height}, width={width} must be at most {largest}: there are no positions above")

    @override
    def clean(self, stored: Stored, noise: Tensor | None = None) -> Tensor:
        x0: Tensor = (stored_latents(stored, noise) - self.facts["shift_factor"]) * self.facts["scaling_factor"]
        return x0

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        return {
            "hidden_states": noisy.to(options.dtype),
            "timestep": scheduler_times(times),
            "encoder_hidden_states": stored["prompt_embeds"].to(options.dtype),
            "pooled_projections": stored["pooled_embeds"].to(options.dtype),
            "return_dict": False,
        }
