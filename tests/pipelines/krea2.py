"""Krea 2."""

from __future__ import annotations

from typing import Any

from diffusers import Krea2Pipeline, Krea2Transformer2DModel

from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud
from tests.pipelines.text.qwen import qwen3_vl
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (24, 40)  # 3 x 5 tokens: the autoencoder makes it 4 times smaller, and the transformer sees patches of 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = qwen3_vl(hidden=16, causal_lm=False)
    transformer = Krea2Transformer2DModel(
        in_channels=4 * _LATENTS,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        timestep_embed_dim=8,
        text_hidden_dim=16,
        num_text_layers=3,
        text_num_attention_heads=4,
        text_num_key_value_heads=2,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )
    return Krea2Pipeline(
        scheduler=flow_match(use_dynamic_shifting=True, max_image_seq_len=6400),
        vae=vaes.qwen_image(_LATENTS, levels=2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
        text_encoder_select_layers=(0, 1, 2),
    )


def _inputs() -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=4.5, max_sequence_length=21)


TINY = {"krea2": TinyPipe(_make, _inputs, guidance="calls")}
