"""The family of the denoisers of `lightning-cp train`: an example of a family for models without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families import (
    Components,
    Facts,
    Family,
    Grid,
    InputOptions,
    Media,
    ObjectiveDefaults,
    Sample,
    Stored,
    StoredBatch,
    TextStorage,
)


class LabelledClips(Family):
    """Clips of pixels with a class label, for `WanDenoiser` and `FluxDenoiser`. The label takes the place of the text.

    `facts["num_classes"]` is the number of classes; that number itself means "no condition".
    """

    name = "labelled_clips"
    pipelines = ()
    components = Components(text=(), media=())
    text = TextStorage("padded", 1, sequences=(), others=("labels",))
    grid = Grid(pixels=1, frame_step=1, patch=(1, 1, 1))
    objective = ObjectiveDefaults()

    @classmethod
    @override
    def read_facts(cls, pipe: Any) -> Facts:
        raise NotImplementedError("the denoisers of lightning-cp train have no pipeline: give the number of classes")

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        return [{"labels": torch.tensor(int(caption))} for caption in captions]

    @override
    def encode_media(self, pipe: Any, media: Media) -> list[Sample]:
        return [{"pixels": x} for x in media["pixels"]]

    @override
    def clean(self, stored: Stored, noise: Tensor | None = None) -> Tensor:
        return stored["pixels"]

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        return {"noisy": noisy, "times": times, "labels": stored["labels"]}

    @override
    def prediction(self, output: Tensor, noisy: Tensor) -> Tensor:
        return output

    def batch(self, pixels: Tensor, labels: Tensor) -> StoredBatch:
        """Return a batch for `Objective.loss`. Args: pixels: [b, c, f, h, w]. labels: int64 [b]."""
        empty = torch.full_like(labels[:1], self.facts["num_classes"])
        return StoredBatch({"pixels": pixels, "labels": labels}, {"labels": empty})
