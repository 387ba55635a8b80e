"""AuraFlow."""

from __future__ import annotations

from typing import Any

from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel

from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud
from tests.pipelines.text.t5 import umt5
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (12, 20)  # 3 x 5 tokens: the autoencoder halves both, and the transformer sees patches of 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = umt5(width=16)
    transformer = AuraFlowTransformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=_LATENTS,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=16,
        out_channels=_LATENTS,
        pos_embed_max_size=64,
    )
    return AuraFlowPipeline(
        scheduler=flow_match(shift=1.73),
        vae=vaes.kl(_LATENTS, levels=2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
    )


def _inputs() -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=3.5, max_sequence_length=29)


TINY = {"auraflow": TinyPipe(_make, _inputs, guidance="batch")}
