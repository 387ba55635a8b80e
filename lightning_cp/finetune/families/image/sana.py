"""Sana: text to image with an autoencoder that makes pictures 32 times smaller.

The transformer takes times in [0, 1000] times `timestep_scale`. An instruction is put before each caption, as in
sampling; the empty caption has none, because negative prompts have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *


class Sana(MaskedTextPictures):
    """Sana 1.0 and 1.5, text to image."""

    name = "sana"
    pipelines = ("SanaPipeline",)

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        return {
            **super().read_facts(pipe),
            "instruction": list(call_default(pipe, "complex_human_instruction")),
            "timestep_scale": pipe.transformer.config.timestep_scale,
            "shift": shift_facts(pipe.scheduler),
        }

    @property
    @override
    def objective(self) -> ObjectiveDefaults:
        return ObjectiveDefaults(shift=shift_from(self.facts["shift"]))

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        texts = self.encoded(pipe, captions, complex_human_instruction=self.facts["instruction"])
        if "" in captions:
            (empty,) = self.encode_negative(pipe, [""])
            texts = [text if caption else empty for text, caption in zip(texts, captions, strict=True)]
        return texts

    @override
    def encode_negative(self, pipe: Any, prompts: Sequence[str], media: Media | None = None) -> list[Sample]:
        return self.encoded(pipe, prompts)

    @override
    def inputs(self, noisy: Any, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        timestep = scheduler_times(times) * self.facts["timestep_scale"]
        return {**super().inputs(noisy, times, stored, options), "timestep": timestep}
