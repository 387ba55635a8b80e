"""QwenImage, text to image.

The transformer takes tokens of 2 x 2 latents, time sigma in [0, 1], and text with a mask. The VAE is one for videos:
latents have one frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.family import (
    Components,
    Facts,
    Family,
    Grid,
    InputOptions,
    Media,
    ObjectiveDefaults,
    Sample,
    Stored,
    TextStorage,
    per_channel,
    stored_latents,
)
from lightning_cp.finetune.families.packing import pack, unpack
from lightning_cp.finetune.families.shift import shift_facts, shift_from


class QwenImage(Family):
    """QwenImage, text to image. All samples of a batch must have the same size."""

    name = "qwen_image"
    pipelines = ("QwenImagePipeline",)
    components = Components(text=("text_encoder", "tokenizer"))
    takes_video = True

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        return {
            "pixels": 2 * pipe.vae_scale_factor,
            "latents_mean": list(pipe.vae.config.latents_mean),
            "latents_std": list(pipe.vae.config.latents_std),
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
        return ObjectiveDefaults(shift=shift_from(self.facts["shift"]), posterior="sample")

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        embeds, mask = pipe.encode_prompt(list(captions), max_sequence_length=self.facts["text_length"])
        if mask is None:  # all texts have the same length
            return [{"prompt_embeds": x} for x in embeds]
        return [{"prompt_embeds": x[:length]} for x, length in zip(embeds, mask.sum(dim=1).tolist(), strict=True)]

    @override
    def clean(self, stored: Stored, noise: Tensor | None = None) -> Tensor:
        return self._normalised(stored_latents(stored, noise))

    def _normalised(self, latents: Tensor) -> Tensor:
        mean, std = (per_channel(self.facts[name], latents) for name in ("latents_mean", "latents_std"))
        return (latents - mean) / std

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        height, width = noisy.shape[-2:]
        return {
            "hidden_states": pack(noisy[:, :, 0]).to(options.dtype),
            "timestep": times.float(),
            "encoder_hidden_states": stored["prompt_embeds"].to(options.dtype),
            "encoder_hidden_states_mask": stored.get(self.text.mask),
            "img_shapes": [[(1, height // 2, width // 2)]] * len(noisy),
            "return_dict": False,
        }

    @override
    def prediction(self, output: Tensor, noisy: Tensor) -> Tensor:
        height, width = noisy.shape[-2:]
        return unpack(output, height, width).unsqueeze(2)
