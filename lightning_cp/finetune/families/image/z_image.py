"""Z-Image, text to image.

The transformer takes lists with a picture and a text of each sample, time 1 - sigma, and returns a list of x0 - noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *


class ZImage(Pictures):
    """Z-Image, text to image."""

    name = "z_image"
    pipelines = ("ZImagePipeline",)
    widths = ("in_channels", "cap_feat_dim")
    components = Components(text=("text_encoder", "tokenizer"))
    entries, time_entry = ("x",), "t"
    posterior = "mode"

    @override
    def default_sides(self, pipe: Any) -> dict[str, int]:
        return {"height": 1024, "width": 1024}  # the pipeline's own, if its call gets none

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        embeds, _ = pipe.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=self.facts["text_length"]
        )
        return [{"prompt_embeds": x} for x in embeds]

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        texts, mask = stored["prompt_embeds"].to(options.dtype), stored.get(self.text.mask)
        return {
            "x": list(noisy.unsqueeze(2).to(options.dtype)),
            "t": (1000 - scheduler_times(times)) / 1000,
            "cap_feats": list(texts) if mask is None else [x[kept] for x, kept in zip(texts, mask, strict=True)],
            "return_dict": False,
        }

    @override
    def prediction(self, output: Any, noisy: Tensor) -> Tensor:
        return -torch.stack(list(output)).squeeze(2)
