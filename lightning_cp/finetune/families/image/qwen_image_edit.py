"""QwenImage-Edit and QwenImage-Edit-Plus: a picture is changed according to an instruction.

The tokens of the reference picture follow those of the generated picture. The text encoder sees the reference, too, so
each text belongs to one sample. As in the pipelines, references are resized to an area of 1024 x 1024 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *
from lightning_cp.finetune.families.image.qwen_image import QwenImage

_AREA, _STEP = 1024 * 1024, 32  # pixels of a reference; its sides are multiples of the step
_TEXT_AREA = 384 * 384  # pixels of a reference that the text encoder of Edit-Plus sees


class QwenImageEdit(QwenImage):
    """QwenImage-Edit, with one reference picture.

    `encode_media` and `encode_text` take "reference" [b, 3, 1, h, w] in [-1, 1] besides "pixels".
    """

    name = "qwen_image_edit"
    pipelines = ("QwenImageEditPipeline",)
    components = Components(text=("text_encoder", "tokenizer", "processor"))

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        return {**super().read_facts(pipe), "text_length": 2048}  # up to 1369 positions are the picture's

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("masked", self.facts["text_length"], sees_media=True)

    @override
    def reference_size(self, *, height: int, width: int) -> tuple[int, int]:
        return _resized(height, width, _AREA)

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        pictures = to_images(self._reference(media))
        if len(pictures) != len(captions):
            raise FamilyError(f"{self.name} needs a reference for each of {len(captions)} texts, got {len(pictures)}")
        pairs = zip(captions, pictures, strict=True)
        return [{"prompt_embeds": self._text_of(pipe, caption, picture)} for caption, picture in pairs]

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        pictures = to_images(self._reference(media))
        encoded = zip(super().encode_media(pipe, media), pictures, strict=True)
        return [{**sample, "reference": self._latents_of(pipe, picture)} for sample, picture in encoded]

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        arguments = super().inputs(noisy, times, stored, options)
        reference = self.normalised(stored["reference"].float())
        height, width = reference.shape[-2:]
        tokens = torch.cat([arguments["hidden_states"], pack(reference).to(options.dtype)], dim=1)
        shapes = [[*sizes, (1, height // 2, width // 2)] for sizes in arguments["img_shapes"]]
        return {**arguments, "hidden_states": tokens, "img_shapes": shapes}

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {"image": condition_image(media["reference"])}

    def _reference(self, media: Media | None) -> Tensor:
        if media is None or "reference" not in media:
            raise FamilyError(f'{self.name} needs a "reference" picture for each picture and each text')
        return media["reference"]

    def _text_of(self, pipe: Any, caption: str, picture: Any) -> Tensor:
        """Encode one caption with its picture; in a batch, the pipelines would pad it. Returns: [length, dim]."""
        height, width = _resized(picture.height, picture.width, _AREA)
        embeds, _ = pipe.encode_prompt([caption], image=pipe.image_processor.resize(picture, height, width))
        text: Tensor = embeds[0]
        return text

    def _latents_of(self, pipe: Any, picture: Any) -> Tensor:
        """Encode one reference; in a batch, kernels round differently. Returns: [c, 1, h, w], not normalised."""
        height, width = _resized(picture.height, picture.width, _AREA)
        pixels = pipe.image_processor.preprocess(picture, height, width)
        return latent_mode(pipe.vae, pixels.unsqueeze(2))[0]


class QwenImageEditPlus(QwenImageEdit):
    """QwenImage-Edit-Plus with one reference picture; the pipeline also takes several.

    The text encoder sees the reference in an area of 384 x 384 pixels.
    """

    name = "qwen_image_edit_plus"
    pipelines = ("QwenImageEditPlusPipeline",)

    @override
    def _text_of(self, pipe: Any, caption: str, picture: Any) -> Tensor:
        height, width = _resized(picture.height, picture.width, _TEXT_AREA)
        embeds, _ = pipe.encode_prompt([caption], image=[pipe.image_processor.resize(picture, height, width)])
        text: Tensor = embeds[0]
        return text


def _resized(height: int, width: int, area: int) -> tuple[int, int]:
    """Return the size that the pipelines resize a picture to: about this area, with the same aspect ratio."""
    wanted = math.sqrt(area * (width / height))
    return round(wanted / (width / height) / _STEP) * _STEP, round(wanted / _STEP) * _STEP
