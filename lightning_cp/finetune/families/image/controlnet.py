"""ControlNets of FLUX.1 and QwenImage: a side model that sees a control picture, for a frozen transformer.

The control picture is as large as the generated one. The ControlNet takes the transformer's arguments and the tokens of
the control picture; its outputs are added to the hidden states of the transformer's blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *
from lightning_cp.finetune.families.image.flux import Flux
from lightning_cp.finetune.families.image.qwen_image import QwenImage


class WithControlNet(Pictures):
    """The parts that families of pictures with a ControlNet share.

    `encode_media` takes "reference" [b, 3, 1, h, w] in [-1, 1], the control picture, besides "pixels".
    """

    picture = "control_image"
    lora_targets = ()
    condition_entries = ("controlnet_cond",)

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        if error := controlnet_error(type(pipe.controlnet).__name__, pipe.controlnet.config, pipe.transformer.config):
            raise FamilyError(f"{type(pipe).__name__}: {error}")
        return super().read_facts(pipe)

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        if "reference" not in media:
            raise FamilyError(f'{self.name} needs a "reference" picture, the control, for each picture in "pixels"')
        control, pixels = media["reference"], media["pixels"]
        if control.shape[-2:] != pixels.shape[-2:]:
            raise FamilyError(
                f"the control must be as large as the picture, {list(pixels.shape[-2:])} rows and columns: "
                f"got {list(control.shape[-2:])}"
            )
        # the pipeline copies the picture, for several prompts
        latents = latent_mode(pipe.vae, control if self.takes_video else control[:, :, 0], channels_last=False)
        encoded = zip(super().encode_media(pipe, media), latents, strict=True)
        return [{**sample, "control": x} for sample, x in encoded]

    def with_control(
        self, arguments: dict[str, Any], stored: Stored, options: InputOptions, **changed: Any
    ) -> dict[str, Any]:
        """Add the ControlNet's arguments to those of the transformer. Args: changed: those that differ."""
        control = pack(self.normalised_control(stored["control"].float())).to(options.dtype)
        side = {**arguments, **changed, "controlnet_cond": control, "conditioning_scale": 1.0}
        return {**arguments, CONTROLNET: side}

    def normalised_control(self, latents: Tensor) -> Tensor:
        """Normalise float32 latents of the control picture, as the pipeline does."""
        return self.normalised(latents)

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {"control_image": condition_image(media["reference"])}


class FluxControlNet(WithControlNet, Flux):
    """FLUX.1 with a ControlNet for one kind of control."""

    name = "flux_controlnet"
    pipelines = ("FluxControlNetPipeline",)
    components = replace(
        Flux.components, side=SideModel(CONTROLNET, ("controlnet_block_samples", "controlnet_single_block_samples"))
    )

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        return {**super().read_facts(pipe), "control_guidance_embeds": bool(pipe.controlnet.config.guidance_embeds)}

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        guidance = None
        if self.facts["control_guidance_embeds"]:
            guidance = torch.full([len(noisy)], options.guidance, dtype=torch.float32, device=noisy.device)
        arguments = super().inputs(noisy, times, stored, options)
        return {**self.with_control(arguments, stored, options, guidance=guidance), "controlnet_blocks_repeat": False}


class QwenImageControlNet(WithControlNet, QwenImage):
    """QwenImage with a ControlNet."""

    name = "qwen_image_controlnet"
    pipelines = ("QwenImageControlNetPipeline",)
    components = replace(QwenImage.components, side=SideModel(CONTROLNET, ("controlnet_block_samples",)))

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        arguments = super().inputs(noisy, times, stored, options)
        shapes = [sizes for (sizes,) in arguments["img_shapes"]]  # without a list for each sample, as in the pipeline
        return self.with_control({**arguments, "img_shapes": shapes}, stored, options)

    @override
    def normalised_control(self, latents: Tensor) -> Tensor:
        mean, std = (per_channel(self.facts[name], latents) for name in ("latents_mean", "latents_std"))
        return (latents - mean) * (1.0 / std)  # unlike for the latents of the picture, the pipeline multiplies
