"""QwenImage 2.1: text to image and editing, with kept keys and without."""

from __future__ import annotations

from typing import Any

from diffusers import QwenImage21Pipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud, picture
from tests.pipelines.text.qwen import qwen3_vl, qwen3_vl_processor
from tests.pipelines.tiny import TinyPipe

_LATENTS = 8
_SIZE = (96, 160)  # 6 x 10 tokens: the autoencoder makes it 16 times smaller, and a text position is replaced by 2 x 2


def _make() -> Any:
    tokenizer, text_encoder = qwen3_vl(hidden=16)
    transformer = MODELS["qwen_image21"].make()
    return QwenImage21Pipeline(
        scheduler=flow_match(),
        vae=vaes.qwen_image21(_LATENTS),
        text_encoder=text_encoder,
        processor=qwen3_vl_processor(tokenizer, largest=16),  # as many tokens as the transformer has for 2 x 2
        transformer=loud(transformer),
    )


def _inputs(use_kv_cache: bool = False, **others: Any) -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, true_cfg_scale=3.0, use_kv_cache=use_kv_cache, **others)


def _edit(use_kv_cache: bool = False) -> dict[str, Any]:
    return _inputs(use_kv_cache, image=picture(96, 64), output_resolution=96)


TINY = {
    "qwen_image21": TinyPipe(_make, _inputs, guidance="calls"),
    "qwen_image21_edit": TinyPipe(_make, _edit, guidance="calls"),
    # Kept keys are refused with cfg above 1, so "none": these are not tried with it.
    "qwen_image21_kept": TinyPipe(_make, lambda: _inputs(use_kv_cache=True), guidance="none"),
    "qwen_image21_edit_kept": TinyPipe(_make, lambda: _edit(use_kv_cache=True), guidance="none"),
}
