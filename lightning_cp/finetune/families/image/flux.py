"""FLUX.1: text to image, and Kontext (with reference pictures).

The transformer takes tokens of 2 x 2 latents, time sigma in [0, 1], and two text embeddings without masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *


class Flux(Pictures):
    """FLUX.1-dev and -schnell, text to image."""

    name = "flux"
    pipelines = ("FluxPipeline",)
    widths, packed = ("in_channels", "joint_attention_dim"), 4
    components = Components(text=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        return {**super().read_facts(pipe), "guidance_embeds": bool(pipe.transformer.config.guidance_embeds)}

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("padded", self.facts["text_length"], others=("pooled_embeds",))

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        embeds, pooled, _ = pipe.encode_prompt(list(captions), None, max_sequence_length=self.facts["text_length"])
        return [{"prompt_embeds": x, "pooled_embeds": y} for x, y in zip(embeds, pooled, strict=True)]

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        height, width = noisy.shape[-2:]
        text = stored["prompt_embeds"]
        return {
            "hidden_states": pack(noisy).to(options.dtype),
            "encoder_hidden_states": text.to(options.dtype),
            "pooled_projections": stored["pooled_embeds"].to(options.dtype),
            "timestep": times.float(),
            "img_ids": positions(height // 2, width // 2, device=noisy.device),
            "txt_ids": torch.zeros(text.shape[1], 3, device=noisy.device, dtype=torch.float32),
            "guidance": self.guidance(noisy, options),
            "return_dict": False,
        }


class FluxKontext(Flux):
    """FLUX.1-Kontext: a reference picture is appended to the tokens of the picture that is generated.

    `encode_media` takes "reference" [b, 3, 1, h, w] in [-1, 1] besides "pixels"; its size may differ.
    """

    name = "flux_kontext"
    pipelines = ("FluxKontextPipeline",)

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        if "reference" not in media:
            raise FamilyError('flux_kontext needs a "reference" picture for each picture in "pixels"')
        reference = media["reference"][:, :, 0]
        self.check_size(height=reference.shape[-2], width=reference.shape[-1])
        encoded = zip(super().encode_media(pipe, media), latent_mode(pipe.vae, reference), strict=True)
        return [{**sample, "reference": x} for sample, x in encoded]

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        arguments = super().inputs(noisy, times, stored, options)
        reference = self.normalised(stored["reference"].float())
        height, width = reference.shape[-2:]
        ids = positions(height // 2, width // 2, device=noisy.device)
        ids[:, 0] = 1
        tokens = torch.cat([arguments["hidden_states"], pack(reference).to(options.dtype)], dim=1)
        return {**arguments, "hidden_states": tokens, "img_ids": torch.cat([arguments["img_ids"], ids])}

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        height, width = media["reference"].shape[-2:]
        return {"image": condition_image(media["reference"]), "_auto_resize": False, "max_area": height * width}
