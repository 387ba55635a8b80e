"""FLUX.2-dev and FLUX.2-klein: text to image, with or without a reference picture.

The VAE's latents are normalised in patches of 2 x 2, so x0 is [b, 4 · channels, h/2, w/2] and each of its positions is
a token. Times are sigma in [0, 1], and text has no mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *

_AREA, _SIDE, _RATIO = 1024 * 1024, 64, 8  # the pipelines' limits of a reference: pixels, shortest side, aspect ratio
_REFERENCE_TIME = 10  # first position of a reference's tokens; those of the generated picture have 0


class Flux2(Pictures):
    """FLUX.2-dev.

    `encode_media` takes "reference" [b, 3, 1, h, w] in [-1, 1] besides "pixels", if the data have references.
    """

    name = "flux2"
    pipelines = ("Flux2Pipeline",)
    widths, packed = ("in_channels", "joint_attention_dim"), 4
    components = Components(text=("text_encoder", "tokenizer"))
    lora_targets = (*Pictures.lora_targets, "to_qkv_mlp_proj", "to_out")  # fused layers of single blocks
    optional_reference = True
    posterior = "mode"
    statistics = ()  # they are weights of the VAE, not in its config

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        batch_norm = pipe.vae.bn
        variance = batch_norm.running_var.float() + pipe.vae.config.batch_norm_eps
        return {
            **super().read_facts(pipe),
            "latents_mean": batch_norm.running_mean.float().tolist(),
            "latents_std": variance.sqrt().tolist(),
            "guidance_embeds": bool(pipe.transformer.config.guidance_embeds),
        }

    @property
    @override
    def grid(self) -> Grid:
        return Grid(pixels=self.facts["pixels"], frame_step=0, patch=(1, 1, 1))

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("padded", self.facts["text_length"])

    @override
    def reference_size(self, *, height: int, width: int) -> tuple[int, int]:
        scale, step = min(1.0, math.sqrt(_AREA / (height * width))), self.facts["pixels"]
        return int(height * scale) // step * step, int(width * scale) // step * step

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        embeds, _ = pipe.encode_prompt(list(captions), max_sequence_length=self.facts["text_length"])
        return [{"prompt_embeds": x} for x in embeds]

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        samples = super().encode_media(pipe, media)
        if "reference" not in media:
            return samples
        reference = media["reference"][:, :, 0]
        self._check_reference(*reference.shape[-2:])
        encoded = zip(samples, latent_mode(pipe.vae, reference), strict=True)
        return [{**sample, "reference": x} for sample, x in encoded]

    @override
    def normalised(self, latents: Tensor) -> Tensor:
        b, c, height, width = latents.shape
        patches = pack(latents).transpose(1, 2).reshape(b, 4 * c, height // 2, width // 2)
        return super().normalised(patches)

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        text, reference = stored["prompt_embeds"], stored.get("reference")
        pictures = {0: noisy}
        if reference is not None:
            pictures[_REFERENCE_TIME] = self.normalised(reference.float())
        return {
            "hidden_states": torch.cat([_tokens(x) for x in pictures.values()], dim=1).to(options.dtype),
            "encoder_hidden_states": text.to(options.dtype),
            "timestep": times.float(),
            "img_ids": torch.cat([_ids((time, *x.shape[-2:], 1), like=x) for time, x in pictures.items()], dim=1),
            "txt_ids": _ids((0, 1, 1, text.shape[1]), like=text),
            "guidance": self.guidance(noisy, options),
            "return_dict": False,
        }

    @override
    def prediction(self, output: Any, noisy: Tensor) -> Tensor:
        height, width = noisy.shape[-2:]
        picture: Tensor = output[:, : height * width]
        return picture.transpose(1, 2).reshape(noisy.shape)

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {"image": condition_image(media["reference"])} if "reference" in media else {}

    def _check_reference(self, height: int, width: int) -> None:
        self.check_size(height=height, width=width)
        valid = min(height, width) >= _SIDE and max(height, width) <= _RATIO * min(height, width)
        if not valid or height * width > _AREA:
            raise FamilyError(
                f"the reference has height={height}, width={width}: both must be at least {_SIDE}, their ratio at most "
                f"{_RATIO}, and the area at most {_AREA} pixels"
            )


class Flux2Klein(Flux2):
    """FLUX.2-klein: another text encoder, and no guidance embedding."""

    name = "flux2_klein"
    pipelines = ("Flux2KleinPipeline",)


def _tokens(latents: Tensor) -> Tensor:
    """Convert x0 [b, c, h, w] to tokens [b, h · w, c]."""
    return latents.flatten(2).transpose(1, 2)


def _ids(sizes: tuple[int, ...], *, like: Tensor) -> Tensor:
    """Return the (time, row, column, layer) positions of tokens, int64 [b, rows · columns · layers, 4].

    Args: sizes: the time of all tokens, and the numbers of rows, columns and layers.
    """
    time, *numbers = sizes
    axes = [torch.arange(first, first + n, device=like.device) for first, n in ((time, 1), *((0, n) for n in numbers))]
    return torch.cartesian_prod(*axes).expand(len(like), -1, -1)
