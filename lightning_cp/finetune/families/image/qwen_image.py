"""QwenImage, text to image.

The transformer takes tokens of 2 x 2 latents, time sigma in [0, 1], and text with a mask. The VAE is one for videos:
latents have one frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_cp.finetune.families.base import *


class QwenImage(Pictures):
    """QwenImage, text to image. All samples of a batch must have the same size."""

    name = "qwen_image"
    pipelines = ("QwenImagePipeline",)
    widths, packed = ("in_channels", "joint_attention_dim"), 4
    components = Components(text=("text_encoder", "tokenizer"))
    takes_video = True
    statistics = ("latents_mean", "latents_std")

    @override
    def encode_text(self, pipe: Any, captions: Sequence[str], media: Media | None = None) -> list[Sample]:
        embeds, mask = pipe.encode_prompt(list(captions), max_sequence_length=self.facts["text_length"])
        if mask is None:  # all texts have the same length
            return [{"prompt_embeds": x} for x in embeds]
        return [{"prompt_embeds": x[:length]} for x, length in zip(embeds, mask.sum(dim=1).tolist(), strict=True)]

    @override
    def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        height, width = noisy.shape[-2:]
        return {
            "hidden_states": pack(noisy).to(options.dtype),
            "timestep": times.float(),
            "encoder_hidden_states": stored["prompt_embeds"].to(options.dtype),
            "encoder_hidden_states_mask": stored.get(self.text.mask),
            "img_shapes": [[(1, height // 2, width // 2)]] * len(noisy),
            "return_dict": False,
        }
