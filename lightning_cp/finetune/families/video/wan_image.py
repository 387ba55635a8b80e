"""Wan 2.1 and 2.2, image to video, and 2.2 TI2V with a time per token."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_cp.compat.versions import needs
from lightning_cp.finetune.families.base import *
from lightning_cp.finetune.families.video.wan import Wan


class WanImageToVideo(Wan):
    """Wan, image to video. The first frame of each clip in "pixels" is the condition.

    Channels are [noisy latents | mask | condition]. With `expand_timesteps` (TI2V) they are the noisy latents only: the
    first latent frame is then the clean condition, with time 0 and without a loss.
    """

    name = "wan_image_to_video"
    pipelines = ("WanImageToVideoPipeline",)
    components = Components(
        text=("text_encoder", "tokenizer"),
        media=("vae", "image_encoder", "image_processor"),
        train=("transformer", "transformer_2"),
    )

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        transformer = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
        takes_image = pipe.transformer is not None and transformer.config.image_dim is not None
        return {**super().read_facts(pipe), "image_embeds": takes_image}

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        if find_spec("ftfy") is None:  # diffusers then raises a NameError
            raise FamilyError(needs("the text of Wan's image to video", "ftfy"))
        return super().encode_text(pipe, captions, media)

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        samples = super().encode_media(pipe, media)
        first = media["pixels"][:, :, :1]
        if self.facts["expand_timesteps"]:
            condition = latent_mode(pipe.vae, first)
        else:
            frames = media["pixels"].shape[2]
            condition = latent_mode(pipe.vae, F.pad(first, (0, 0, 0, 0, 0, frames - 1)))  # grey: pixels are in [-1, 1]
        for sample, x in zip(samples, condition, strict=True):
            sample["condition"] = x
        if self.facts["image_embeds"]:
            with torch.no_grad():
                for sample, x in zip(samples, pipe.encode_image(to_images(first)), strict=True):
                    sample["image_embeds"] = x
        return samples

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        arguments = super().inputs(noisy, times, stored, options)
        condition = self.normalised(stored["condition"])
        if self.facts["expand_timesteps"]:
            tokens_per_frame = self.grid.tokens((noisy.shape[1], 1, *noisy.shape[-2:]))
            arguments["timestep"][:, :tokens_per_frame] = 0
            hidden = torch.cat([condition, noisy[:, :, 1:].float()], dim=2)
        else:
            hidden = torch.cat([noisy.float(), self._mask(noisy), condition], dim=1)
        arguments["hidden_states"] = hidden.to(options.dtype)
        if self.facts["image_embeds"]:
            arguments["encoder_hidden_states_image"] = stored["image_embeds"].to(options.dtype)
        return arguments

    @override
    def check_size(self, *, height: int, width: int, frames: int = 1) -> None:
        super().check_size(height=height, width=width, frames=frames)
        if self.facts["expand_timesteps"]:
            check_more_frames(frames)

    @override
    def given_mask(self, stored: Stored, clean: Tensor) -> Tensor | None:
        return first_frame_mask(clean) if self.facts["expand_timesteps"] else None

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {"image": condition_image(media["pixels"])}

    def _mask(self, noisy: Tensor) -> Tensor:
        """Return 1 for the pixel frames that are given, folded to one channel per pixel frame of a latent frame."""
        b, _, f, h, w = noisy.shape
        mask = torch.zeros(b, self.facts["temporal"], f, h, w, device=noisy.device)
        mask[:, :, 0] = 1
        return mask
