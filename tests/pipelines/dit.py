"""DiT, by classes."""

from __future__ import annotations

from typing import Any

from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

from tests.pipelines import vaes
from tests.pipelines.common import loud
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4


def _make() -> Any:
    transformer = DiTTransformer2DModel(
        in_channels=_LATENTS,
        out_channels=2 * _LATENTS,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_embeds_ada_norm=1000,
        patch_size=2,
        sample_size=6,  # 3 x 3 tokens
    )
    return DiTPipeline(
        transformer=loud(transformer), vae=vaes.kl(_LATENTS, levels=2, quant=True), scheduler=DDIMScheduler()
    )


def _inputs() -> dict[str, Any]:
    """It has no latents to give: images are compared."""
    return {"class_labels": [1, 3], "guidance_scale": 4.0, "num_inference_steps": 2, "output_type": "np"}


TINY = {"dit": TinyPipe(_make, _inputs, guidance="batch")}
