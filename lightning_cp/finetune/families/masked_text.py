"""Text that is stored with its padding and a mask: LTX-Video, Sana and PixArt."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.family import (
    Components,
    Facts,
    Family,
    Grid,
    InputOptions,
    Media,
    Sample,
    Stored,
    TextStorage,
    stored_latents,
)


class MaskedText(Family):
    """One text, stored with its padding and the mask of it."""

    components = Components(text=("text_encoder", "tokenizer"))
    widths: ClassVar[tuple[str, ...]] = ("in_channels", "caption_channels")

    @property
    @override
    def text(self) -> TextStorage:
        return TextStorage("padded", self.facts["text_length"], others=("text_mask",))

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        return self.encoded(pipe, captions)

    def encoded(self, pipe: Any, captions: Sequence[str], **settings: Any) -> list[Sample]:
        """Encode captions with further arguments of the pipeline's `encode_prompt`."""
        embeds, mask, _, _ = pipe.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.facts["text_length"], **settings
        )
        return [{"prompt_embeds": x, "text_mask": y} for x, y in zip(embeds, mask, strict=True)]


class MaskedTextPictures(MaskedText):
    """Latents [b, c, h, w] that are not packed. The text enters by cross-attention."""

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        patch = pipe.transformer.config.patch_size
        return {
            "pixels": pipe.vae_scale_factor * patch,
            "patch": patch,
            "scaling_factor": pipe.vae.config.scaling_factor,
            "text_length": call_default(pipe, "max_sequence_length"),
        }

    @property
    @override
    def grid(self) -> Grid:
        return Grid(pixels=self.facts["pixels"], frame_step=0, patch=(1, self.facts["patch"], self.facts["patch"]))

    @override
    def clean(self, stored: Stored, noise: Any = None) -> Tensor:
        x0: Tensor = stored_latents(stored, noise) * self.facts["scaling_factor"]
        return x0

    @override
    def inputs(self, noisy: Any, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        return {
            "hidden_states": noisy.to(options.dtype),
            "timestep": times,
            "encoder_hidden_states": stored["prompt_embeds"].to(options.dtype),
            "encoder_attention_mask": stored["text_mask"],
            "return_dict": False,
        }

    @override
    def prediction(self, output: Any, noisy: Any) -> Tensor:
        predicted: Tensor = output[:, : noisy.shape[1]]  # channels after them are a learned variance
        return predicted

    @override
    def call_arguments(self, media: Media) -> dict[str, Any]:
        return {"use_resolution_binning": False}


def call_default(pipe: Any, argument: str) -> Any:
    """Return the default of an argument of the pipeline's call."""
    return inspect.signature(type(pipe).__call__).parameters[argument].default
