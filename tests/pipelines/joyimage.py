"""JoyImage Edit and JoyImage Edit Plus."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    JoyImageEditPipeline,
    JoyImageEditPlusPipeline,
    JoyImageEditPlusTransformer3DModel,
    JoyImageEditTransformer3DModel,
)

from tests.pipelines.common import NEGATIVE, asked, flow_match, loud, picture
from tests.pipelines.text.qwen import qwen3_vl, qwen3_vl_processor
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_PATCH = 16  # of the autoencoder, which halves images twice besides
_SIZE = (896, 1152)  # one of the sizes that the pipeline has: 7 x 9 tokens, and the transformer sees patches of 2 x 2
_PLUS_SIZE = (384, 640)  # 3 x 5 tokens


def _make(pipeline: type) -> Any:
    tokenizer, text_encoder = qwen3_vl(hidden=16)
    plus = pipeline is JoyImageEditPlusPipeline
    transformer = (JoyImageEditPlusTransformer3DModel if plus else JoyImageEditTransformer3DModel)(
        patch_size=[1, 2, 2],
        in_channels=_LATENTS,
        hidden_size=32,
        num_attention_heads=4,
        text_dim=16,
        num_layers=2,
        rope_dim_list=[4, 2, 2],
        theta=256,
    )
    return pipeline(
        scheduler=flow_match(),
        vae=AutoencoderKLWan(
            base_dim=4,
            z_dim=_LATENTS,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, False],
            latents_mean=[0.0] * _LATENTS,
            latents_std=[0.2] * _LATENTS,  # small: so pictures differ much in latents
            in_channels=3 * _PATCH**2,
            out_channels=3 * _PATCH**2,
            patch_size=_PATCH,
            scale_factor_spatial=4 * _PATCH,
            scale_factor_temporal=1,
        ).eval(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer, gain=3.0),
        processor=qwen3_vl_processor(tokenizer),
    )


def _inputs(size: tuple[int, int] = _SIZE, **others: Any) -> dict[str, Any]:
    return asked(*size, negative_prompt=NEGATIVE, guidance_scale=4.0, **others)


def _edit() -> dict[str, Any]:
    torch.manual_seed(5)  # the pipeline draws from its autoencoder without the generator that it is given
    return _inputs(image=picture(7, 9))


TINY = {
    "joyimage": TinyPipe(lambda: _make(JoyImageEditPipeline), _inputs, guidance="calls"),
    "joyimage_edit": TinyPipe(lambda: _make(JoyImageEditPipeline), _edit, guidance="calls"),
    "joyimage_plus": TinyPipe(
        lambda: _make(JoyImageEditPlusPipeline),
        lambda: _inputs(_PLUS_SIZE, images=[picture(7, 9)]),
        guidance="batch",
    ),
}
