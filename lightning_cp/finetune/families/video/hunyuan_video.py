"""HunyuanVideo, text to video; HunyuanVideo 1.5, text to video and image to video.

The transformers take unpacked latents, times in [0, 1000], and text with padding and a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_cp.finetune.families.base import *


class HunyuanVideo(Family):
    """HunyuanVideo, text to video. Guidance is an input of the transformer, which takes it times 1000."""

    name = "hunyuan_video"
    pipelines = ("HunyuanVideoPipeline",)
    widths = ("out_channels", "text_embed_dim")
    components = Components(text=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    takes_video = True
    lora_targets = (*Family.lora_targets, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        return {
            **cls.shared_facts(pipe),
            "text_length": call_default(pipe, "max_sequence_length"),
            "guidance_embeds": bool(pipe.transformer.config.guidance_embeds),
        }

    @classmethod
    def shared_facts(cls, pipe: Any) -> Facts:
        """Read the facts of both versions."""
        config = pipe.transformer.config
        return {
            "spatial": pipe.vae_scale_factor_spatial,
            "temporal": pipe.vae_scale_factor_temporal,
            "scaling_factor": pipe.vae.config.scaling_factor,
            "patch": [config.patch_size_t, config.patch_size, config.patch_size],
            "shift": shift_facts(pipe.scheduler),
        }

    @property
    @override
    def grid(self) -> Grid:
        return Grid.of_clips(self.facts)

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("padded", self.facts["text_length"], others=("text_mask", "pooled_embeds"))

    @property
    @override
    def objective(self) -> ObjectiveDefaults:
        guidance = 1.0 if self.facts.get("guidance_embeds") else None
        return ObjectiveDefaults(shift=shift_from(self.facts["shift"]), guidance=guidance)

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        encoded = pipe.encode_prompt(list(captions), max_sequence_length=self.facts["text_length"])
        names = ("prompt_embeds", "pooled_embeds", "text_mask")
        return [dict(zip(names, tensors, strict=True)) for tensors in zip(*encoded, strict=True)]

    @override
    def clean(self, stored: Stored, noise: Any = None) -> Tensor:
        x0: Tensor = stored["latents"].float() * self.facts["scaling_factor"]
        return x0

    @override
    def inputs(self, noisy: Any, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        # in the dtype of the activations, as in the pipeline: in bfloat16, 6 · 1000 is 6016
        guidance = 1000 * torch.full([len(noisy)], options.guidance, dtype=options.dtype, device=noisy.device)
        return {
            **self.shared_inputs(noisy, times, stored, options),
            "pooled_projections": stored["pooled_embeds"].to(options.dtype),
            "guidance": guidance,
        }

    def shared_inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        """Build the arguments of both versions."""
        return {
            "hidden_states": noisy.to(options.dtype),
            "timestep": scheduler_times(times),
            "encoder_hidden_states": stored["prompt_embeds"].to(options.dtype),
            "encoder_attention_mask": stored["text_mask"].to(options.dtype),
            "return_dict": False,
        }


class HunyuanVideo15(HunyuanVideo):
    """HunyuanVideo 1.5, text to video: a second text encoder reads what captions quote.

    Channels are [noisy latents | condition | mask]. Condition, mask and embeddings of a picture are zeros.
    """

    name = "hunyuan_video15"
    pipelines = ("HunyuanVideo15Pipeline",)

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        if pipe.transformer.config.use_meanflow:
            raise FamilyError(
                f"{cls.name}: the transformer has use_meanflow=True: it is distilled to few steps, and cannot be "
                "trained with flow matching. Use the transformer that it was distilled from"
            )
        return {
            **cls.shared_facts(pipe),
            "text_length": pipe.tokenizer_max_length,
            "quoted_length": pipe.tokenizer_2_max_length,
            "image_embeds": [pipe.vision_num_semantic_tokens, pipe.transformer.config.image_embed_dim],
        }

    @property
    @override
    def text(self) -> TextStorage:
        quoted = TextStorage(
            "padded", self.facts["quoted_length"], sequences=("quoted_embeds",), others=("quoted_mask",)
        )
        return TextStorage("padded", self.facts["text_length"], others=("text_mask",), more=(quoted,))

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        encoded = pipe.encode_prompt(list(captions), batch_size=len(captions))
        names = ("prompt_embeds", "text_mask", "quoted_embeds", "quoted_mask")
        return [dict(zip(names, tensors, strict=True)) for tensors in zip(*encoded, strict=True)]

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        samples = []
        for clip in media["pixels"]:  # the mask of the VAE's attention fits one clip only
            samples += super().encode_media(pipe, {"pixels": clip[None]})
        return samples

    @override
    def default_sides(self, pipe: Any) -> dict[str, int]:
        width, height = getattr(pipe, "default_aspect_ratio", (16, 9))  # image to video has none
        sides = pipe.video_processor.calculate_default_height_width(height, width, pipe.target_size)
        return dict(zip(("height", "width"), sides, strict=True))

    @override
    def inputs(self, noisy: Any, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        arguments = self.shared_inputs(noisy, times, stored, options)
        condition = self.condition(noisy, stored).to(options.dtype)
        return {
            **arguments,
            "hidden_states": torch.cat([arguments["hidden_states"], condition], dim=1),
            "timestep": arguments["timestep"].to(options.dtype),  # the transformer takes no other dtype
            "encoder_hidden_states_2": stored["quoted_embeds"].to(options.dtype),
            "encoder_attention_mask_2": stored["quoted_mask"].to(options.dtype),
            "image_embeds": self.image_embeds(noisy, stored).to(options.dtype),
        }

    def condition(self, noisy: Tensor, stored: Stored) -> Tensor:
        """Return the channels after those of the noisy latents: condition and mask, [b, c + 1, f, h, w]."""
        return F.pad(torch.zeros_like(noisy), (0, 0, 0, 0, 0, 0, 0, 1))

    def image_embeds(self, noisy: Tensor, stored: Stored) -> Tensor:
        """Return the embeddings of a picture, [b, length, dim]: zeros for none."""
        return torch.zeros(len(noisy), *self.facts["image_embeds"], device=noisy.device)


class HunyuanVideo15ImageToVideo(HunyuanVideo15):
    """HunyuanVideo 1.5, image to video. The first frame of each clip in "pixels" is the condition."""

    name = "hunyuan_video15_image_to_video"
    pipelines = ("HunyuanVideo15ImageToVideoPipeline",)
    components = replace(HunyuanVideo15.components, media=("vae", "image_encoder", "feature_extractor"))

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        samples, first = super().encode_media(pipe, media), media["pixels"][:, :, :1]
        for sample, frame, image in zip(samples, first, to_images(first), strict=True):
            sample["condition"] = latent_mode(pipe.vae, frame[None])[0]
            with torch.no_grad():
                embeds = pipe.encode_image(image, 1, pipe.image_encoder.device, pipe.image_encoder.dtype)
            sample["image_embeds"] = embeds[0]
        return samples

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {"image": condition_image(media["pixels"])}

    @override
    def condition(self, noisy: Tensor, stored: Stored) -> Tensor:
        latents = self.clean({"latents": stored["condition"]})
        of_first = F.pad(latents, (0, 0, 0, 0, 0, 0, 0, 1), value=1.0)
        return F.pad(of_first, (0, 0, 0, 0, 0, noisy.shape[2] - 1))

    @override
    def image_embeds(self, noisy: Tensor, stored: Stored) -> Tensor:
        embeds: Tensor = stored["image_embeds"]
        return embeds
