"""JoyImage Edit."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLWan, JoyImageEditPipeline, JoyImageEditTransformer3DModel

from tests.pipelines.common import NEGATIVE, asked, flow_match, loud, picture
from tests.pipelines.text.qwen import qwen3_vl, qwen3_vl_processor
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_LEVELS = 6
_SIZE = (896, 1152)  # one of the sizes that the pipeline has: 7 x 9 tokens, halved 6 times and in patches of 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = qwen3_vl(hidden=16)
    transformer = JoyImageEditTransformer3DModel(
        patch_size=[1, 2, 2],
        in_channels=_LATENTS,
        hidden_size=32,
        num_attention_heads=4,
        text_dim=16,
        num_layers=2,
        rope_dim_list=[4, 2, 2],
        theta=256,
    )
    return JoyImageEditPipeline(
        scheduler=flow_match(),
        vae=AutoencoderKLWan(
            base_dim=2,
            z_dim=_LATENTS,
            dim_mult=[1] * (_LEVELS + 1),
            num_res_blocks=0,
            temperal_downsample=[False] * _LEVELS,
            latents_mean=[0.0] * _LATENTS,
            latents_std=[1.0] * _LATENTS,
            scale_factor_spatial=2**_LEVELS,
            scale_factor_temporal=1,
        ).eval(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
        processor=qwen3_vl_processor(tokenizer),
    )


def _inputs(**others: Any) -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=4.0, **others)


TINY = {
    "joyimage": TinyPipe(_make, _inputs, guidance="calls"),
    "joyimage_edit": TinyPipe(_make, lambda: _inputs(image=picture(7, 9)), guidance="calls"),
}
