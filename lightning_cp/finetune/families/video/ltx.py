"""LTX-Video 0.9: text to video, and image to video.

The transformer takes a token per latent, times in [0, 1000], and text that is padded and masked. Positions along time
are in seconds, so each clip is stored with its frame rate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *


class LTX(MaskedText):
    """LTX-Video, text to video. `encode_media` takes "fps" [b] besides "pixels"; without it, the pipeline's default."""

    name = "ltx"
    pipelines = ("LTXPipeline",)
    takes_video = True
    text_length = 128

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        config, vae = pipe.transformer.config, pipe.vae
        if (config.patch_size, config.patch_size_t) != (1, 1):
            raise FamilyError(
                f"{cls.name} has one latent in a token, but the transformer has patch_size={config.patch_size} and "
                f"patch_size_t={config.patch_size_t}"
            )
        return {
            "spatial": pipe.vae_spatial_compression_ratio,
            "temporal": pipe.vae_temporal_compression_ratio,
            "latents_mean": vae.latents_mean.tolist(),
            "latents_std": vae.latents_std.tolist(),
            "scaling_factor": vae.config.scaling_factor,
            "text_length": cls.text_length,
            "fps": float(call_default(pipe, "frame_rate")),
            "shift": shift_facts(pipe.scheduler),
        }

    @property
    @override
    def grid(self) -> Grid:
        return Grid(pixels=self.facts["spatial"], frame_step=self.facts["temporal"], patch=(1, 1, 1))

    @property
    @override
    def objective(self) -> ObjectiveDefaults:
        return ObjectiveDefaults(shift=shift_from(self.facts["shift"]))

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        samples = super().encode_media(pipe, media)
        rates = media.get("fps", torch.full([len(samples)], self.facts["fps"]))
        return [{**sample, "fps": fps.float()} for sample, fps in zip(samples, rates, strict=True)]

    @override
    def clean(self, stored: Stored, noise: Any = None) -> Any:
        return self.normalised(stored["latents"])

    @override
    def inputs(self, noisy: Any, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        _, _, frames, height, width = noisy.shape
        seconds = self.facts["temporal"] / stored["fps"].view(-1, 1, 1, 1, 1)
        return {
            "hidden_states": pack_tokens(noisy).to(options.dtype),
            "encoder_hidden_states": stored["prompt_embeds"].to(options.dtype),
            "timestep": scheduler_times(times),
            "encoder_attention_mask": stored["text_mask"],
            "num_frames": frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (seconds, self.facts["spatial"], self.facts["spatial"]),
            "return_dict": False,
        }

    @override
    def prediction(self, output: Any, noisy: Any) -> Any:
        return unpack_tokens(output, noisy)

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {"frame_rate": float(media["fps"][0])} if "fps" in media else {}

    def normalised(self, latents: Tensor) -> Tensor:
        """Normalise latents of the VAE per channel, [b, c, f, h, w], in float32."""
        mean, std = (per_channel(self.facts[name], latents) for name in ("latents_mean", "latents_std"))
        normalised: Tensor = (latents.float() - mean) * self.facts["scaling_factor"] / std
        return normalised


class LTXCondition(LTX):
    """LTX-Video from 0.9.5 on, text to video: text of 256 positions, and a first latent frame of one frame's length."""

    name = "ltx_condition"
    pipelines = ("LTXConditionPipeline",)
    text_length = 256

    @override
    def inputs(self, noisy: Any, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        arguments = super().inputs(noisy, times, stored, options)
        sizes = [arguments.pop(name) for name in ("num_frames", "height", "width")]
        _, *scales = arguments.pop("rope_interpolation_scale")
        axes = [torch.arange(n, device=noisy.device, dtype=torch.float32) for n in sizes]
        frames, rows, columns = torch.cartesian_prod(*axes).T
        step = self.facts["temporal"]
        seconds = (frames * step + 1 - step).clamp(min=0) * (1.0 / stored["fps"])[:, None]
        pixels = [(x * scale).expand_as(seconds) for x, scale in zip((rows, columns), scales, strict=True)]
        timestep = arguments["timestep"][:, None]
        return {**arguments, "timestep": timestep, "video_coords": torch.stack([seconds, *pixels], dim=1)}


class FirstFrame(LTX):
    """A first frame that is given: its tokens are clean, with time 0. It is the first frame of the clip in "pixels"."""

    @override
    def check_size(self, *, height: int, width: int, frames: int = 1) -> None:
        super().check_size(height=height, width=width, frames=frames)
        check_more_frames(frames)

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        condition = latent_mode(pipe.vae, media["pixels"][:, :, :1])
        encoded = zip(super().encode_media(pipe, media), condition, strict=True)
        return [{**sample, "condition": x} for sample, x in encoded]

    def with_first_frame(self, noisy: Tensor, stored: Stored) -> Tensor:
        """Replace the first latent frame by the condition. Args: noisy: [b, c, f, h, w]."""
        return torch.cat([self.normalised(stored["condition"]).to(noisy.dtype), noisy[:, :, 1:]], dim=2)

    def token_times(self, timestep: Tensor, noisy: Tensor) -> Tensor:
        """Return the time of each token, [b, tokens]: 0 in the first latent frame. Args: timestep: [b]."""
        given = first_frame_mask(noisy).expand(1, 1, *noisy.shape[2:]).reshape(1, -1)
        return torch.where(given, 0.0, timestep[:, None])


class LTXImageToVideo(FirstFrame):
    """LTX-Video, image to video. The first frame of each clip in "pixels" is the condition."""

    name = "ltx_image_to_video"
    pipelines = ("LTXImageToVideoPipeline",)

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        arguments = super().inputs(self.with_first_frame(noisy, stored), times, stored, options)
        return {**arguments, "timestep": self.token_times(arguments["timestep"], noisy)}

    @override
    def given_mask(self, stored: Stored, clean: Tensor) -> Tensor | None:
        return first_frame_mask(clean)

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {**super().call_arguments(media), "image": condition_image(media["pixels"])}


def pack_tokens(latents: Tensor) -> Tensor:
    """Convert latents [b, c, f, h, w] to a token for each, [b, f·h·w, c]."""
    return latents.flatten(2).transpose(1, 2)


def unpack_tokens(tokens: Tensor, like: Tensor) -> Tensor:
    """Convert tokens to latents of the shape of `like`: the inverse of `pack_tokens`."""
    return tokens.transpose(1, 2).reshape(like.shape)
