"""Krea 2, text to image.

The transformer takes tokens of 2 x 2 latents, time sigma in [0, 1], and the text of several layers of the encoder:
[positions, layers, dim], with a mask, because the padding is between the caption and the end of the chat template. The
VAE is QwenImage's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_cp.finetune.families.base import *

_DISTILLED_SHIFT = 1.15  # mu of the pipeline for distilled transformers, at every size


class Krea2(Pictures):
    """Krea 2, text to image."""

    name = "krea2"
    pipelines = ("Krea2Pipeline",)
    widths, packed = ("in_channels", "text_hidden_dim"), 4
    components = Components(text=("text_encoder", "tokenizer"))
    takes_video = True
    lora_targets = (
        *Pictures.lora_targets,
        "to_gate",
        "ff.up",
        "ff.down",
        "img_in",
        "txt_in.linear_1",
        "txt_in.linear_2",
        "time_embed.linear_1",
        "time_embed.linear_2",
        "time_mod_proj",
        "text_fusion.projector",
        "final_layer.linear",
    )
    statistics = ("latents_mean", "latents_std")

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        if pipe.config.patch_size != 2:
            raise FamilyError(f"patch_size={pipe.config.patch_size} of the pipeline must be 2")
        return {**super().read_facts(pipe), "is_distilled": bool(pipe.config.is_distilled)}

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("padded", self.facts["text_length"], others=("prompt_mask",))

    @property
    @override
    def objective(self) -> ObjectiveDefaults:
        right = super().objective
        if not self.facts["is_distilled"] or not isinstance(right.shift, ResolutionShift):
            return right
        constant = replace(right.shift, base_shift=_DISTILLED_SHIFT, max_shift=_DISTILLED_SHIFT, clamp=False)
        return replace(right, shift=constant)

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        embeds, masks = pipe.encode_prompt(list(captions), max_sequence_length=self.facts["text_length"])
        return [{"prompt_embeds": x, "prompt_mask": mask} for x, mask in zip(embeds, masks, strict=True)]

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        height, width = noisy.shape[-2:]
        text = stored["prompt_embeds"]
        ids = positions(height // 2, width // 2, device=noisy.device)
        return {
            "hidden_states": pack(noisy).to(options.dtype),
            "encoder_hidden_states": text.to(options.dtype),
            "timestep": times.float(),
            "position_ids": F.pad(ids, (0, 0, text.shape[1], 0)),  # all positions of the text are 0
            "encoder_attention_mask": stored["prompt_mask"],
            "return_dict": False,
        }
