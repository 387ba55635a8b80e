"""Wan VACE: text to video with a control clip.

A second stack of blocks inside the transformer sees the control clip and steers the other blocks. Only this stack is
trained. The control covers the whole clip: there are no masks of parts to keep, and no reference pictures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *
from lightning_cp.finetune.families.video.wan import Wan


class WanVACE(Wan):
    """Wan 2.1 VACE, and 2.2 with two experts.

    `encode_media` takes "reference" [b, 3, f, h, w] in [-1, 1], the control clip, besides "pixels". The stored
    "control" has the latents of a grey clip, in place of parts to keep, and those of the control clip. The
    transformer's control has both, and the mask with one channel for each pixel of a latent.
    """

    name = "wan_vace"
    pipelines = ("WanVACEPipeline",)
    lora_targets = ()
    one_prompt = True
    trained = (VACE,)
    reference_clips = True

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        facts = super().read_facts(pipe)
        config = (pipe.transformer if pipe.transformer is not None else pipe.transformer_2).config
        channels = 2 * len(facts["latents_mean"]) + facts["spatial"] ** 2
        if config.vace_in_channels != channels:
            raise FamilyError(
                f"the transformer has vace_in_channels={config.vace_in_channels}, but the VAE makes {channels}: two "
                f"latents and a mask of {facts['spatial']} × {facts['spatial']} pixels. One of them is from another "
                "pipeline"
            )
        return {**facts, "vace_layers": len(config.vace_layers)}

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        control, pixels = media.get("reference"), media["pixels"]
        if control is None or control.shape[2:] != pixels.shape[2:]:
            found = "there is none" if control is None else f"got {list(control.shape[2:])}"
            raise FamilyError(
                f'{self.name} needs a control clip as "reference", as large and as long as the clip, '
                f"{list(pixels.shape[2:])} frames, rows and columns: {found}"
            )
        empty = latent_mode(pipe.vae, torch.zeros_like(control[:1]))[0]
        encoded = zip(super().encode_media(pipe, media), latent_mode(pipe.vae, control), strict=True)
        return [{**sample, "control": torch.cat([empty, x])} for sample, x in encoded]

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        parts = [self.normalised(x) for x in stored["control"].chunk(2, dim=1)]
        b, _, f, h, w = parts[0].shape
        mask = torch.ones(b, self.facts["spatial"] ** 2, f, h, w, device=noisy.device)
        scale = torch.ones(self.facts["vace_layers"], device=noisy.device, dtype=options.dtype)
        return {
            **super().inputs(noisy, times, stored, options),
            "control_hidden_states": torch.cat([*parts, mask], dim=1).to(options.dtype),
            "control_hidden_states_scale": scale,
        }

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        (clip,) = to_clips(media["reference"])  # the pipeline takes one
        return {"video": clip}
