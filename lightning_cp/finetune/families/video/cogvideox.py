"""CogVideoX 1.0 and 1.5, text to video and image to video.

The transformer takes latents [b, f, c, h, w], integer times, and text with padding but without a mask. Version 1.5
(`patch_size_t`) needs an even number of latent frames: x0 begins with copies of the first latent frame. The pipeline
generates such frames, too, and drops them before decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_cp.finetune.families.base import *


class CogVideoX(Family):
    """CogVideoX, text to video."""

    name = "cogvideox"
    pipelines = ("CogVideoXPipeline",)
    widths = ("out_channels", "text_embed_dim")
    components = Components(text=("text_encoder", "tokenizer"))
    takes_video = True

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        config = pipe.transformer.config
        return {
            "spatial": pipe.vae_scale_factor_spatial,
            "temporal": pipe.vae_scale_factor_temporal,
            "scaling_factor": pipe.vae.config.scaling_factor,
            "patch": config.patch_size,
            "patch_t": config.patch_size_t,
            "text_length": config.max_text_seq_length,
            "sample_size": [config.sample_height, config.sample_width],
            "learned_positions": bool(config.use_learned_positional_embeddings),
            "rotary_dim": config.attention_head_dim if config.use_rotary_positional_embeddings else None,
            "schedule": diffusion_facts(pipe.scheduler),
        }

    @property
    @override
    def grid(self) -> Grid:
        patch = self.facts["patch"]
        return Grid(
            pixels=self.facts["spatial"] * patch,
            frame_step=self.facts["temporal"],
            patch=(self.facts["patch_t"] or 1, patch, patch),
            frames_first=True,
        )

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("padded", self.facts["text_length"])

    @property
    @override
    def objective(self) -> ObjectiveDefaults:
        return diffusion_defaults(self.facts["schedule"])

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        embeds, _ = pipe.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.facts["text_length"]
        )
        return [{"prompt_embeds": x} for x in embeds]

    @override
    def clean(self, stored: Stored, noise: Tensor | None = None) -> Tensor:
        first = self._extra_frames(stored["latents"].shape[2])
        latents = stored_latents(stored, None if noise is None else noise[:, first:].transpose(1, 2))
        x0 = (latents * self.facts["scaling_factor"]).transpose(1, 2)
        return torch.cat([x0[:, :1].expand(-1, first, -1, -1, -1), x0], dim=1)

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        return {
            "hidden_states": noisy.to(options.dtype),
            "encoder_hidden_states": stored["prompt_embeds"].to(options.dtype),
            "timestep": times,
            "image_rotary_emb": self._rotary(noisy) if self.facts["rotary_dim"] else None,
            "return_dict": False,
        }

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {"max_sequence_length": self.facts["text_length"]}

    @override
    def check_size(self, *, height: int, width: int, frames: int = 1) -> None:
        super().check_size(height=height, width=width, frames=frames)
        size = tuple(n * self.facts["spatial"] for n in self.facts["sample_size"])
        if self.facts["learned_positions"] and (height, width) != size:
            raise FamilyError(f"height={height}, width={width} must be {size}: the learned positions have this size")
        if self.facts["patch_t"] and self.facts["rotary_dim"] and (height > size[0] or width > size[1]):
            raise FamilyError(f"height={height}, width={width} must be at most {size}: there are no positions above")

    def _extra_frames(self, frames: int) -> int:
        return -frames % (self.facts["patch_t"] or 1)

    def _rotary(self, noisy: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotary embedding, float32 [tokens, attention_head_dim]."""
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        patch, patch_t = self.facts["patch"], self.facts["patch_t"]
        frames, _, height, width = noisy.shape[1:]
        grid = (height // patch, width // patch)
        base = (self.facts["sample_size"][0] // patch, self.facts["sample_size"][1] // patch)
        shared = {"embed_dim": self.facts["rotary_dim"], "grid_size": grid, "device": noisy.device}
        if patch_t is None:
            found = get_3d_rotary_pos_embed(crops_coords=_centred(grid, base), temporal_size=frames, **shared)
        else:
            found = get_3d_rotary_pos_embed(
                crops_coords=None, temporal_size=-(-frames // patch_t), grid_type="slice", max_size=base, **shared
            )
        cos, sin = found
        return cos, sin


class CogVideoXImageToVideo(CogVideoX):
    """CogVideoX, image to video. The first frame of each clip in "pixels" is the condition.

    Channels are [noisy latents | condition], with the condition's latents in the first latent frame and zeros in the
    others. The pipeline draws the condition from the VAE's distribution; here it is the distribution's mode. With
    "first_frame" in the media, this is the condition: the first frame with noise.
    """

    name = "cogvideox_image_to_video"
    pipelines = ("CogVideoXImageToVideoPipeline",)
    takes_image_noise = True

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        return {
            **super().read_facts(pipe),
            "invert_scale": bool(pipe.vae.config.invert_scale_latents),
            "takes_ofs": pipe.transformer.config.ofs_embed_dim is not None,
        }

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        samples = super().encode_media(pipe, media)
        condition = latent_mode(pipe.vae, media.get("first_frame", media["pixels"][:, :, :1]))
        return [{**sample, "condition": x} for sample, x in zip(samples, condition, strict=True)]

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        arguments = super().inputs(noisy, times, stored, options)
        scale = self.facts["scaling_factor"]
        condition = (1 / scale if self.facts["invert_scale"] else scale) * stored["condition"].float().transpose(1, 2)
        condition = F.pad(condition, (0, 0, 0, 0, 0, 0, 0, noisy.shape[1] - 1))
        arguments["hidden_states"] = torch.cat([noisy.float(), condition], dim=2).to(options.dtype)
        if self.facts["takes_ofs"]:
            arguments["ofs"] = torch.full([1], 2.0, dtype=options.dtype, device=noisy.device)
        return arguments

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {**super().call_arguments(media), "image": condition_image(media["pixels"])}


def _centred(grid: tuple[int, int], base: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the corners of the largest rectangle with the grid's aspect ratio, centred in the base grid.

    Equal to `get_resize_crop_region_for_grid` of diffusers' pipeline.
    """
    (height, width), (base_height, base_width) = grid, base
    if height / width > base_height / base_width:
        size = (base_height, round(base_height / height * width))
    else:
        size = (round(base_width / width * height), base_width)
    top, left = (round((outer - inner) / 2.0) for outer, inner in zip(base, size, strict=True))
    return (top, left), (top + size[0], left + size[1])
