"""DiT, by classes."""

from __future__ import annotations

from typing import Any

from diffusers import DDIMScheduler, DiTPipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import loud
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4


def _make() -> Any:
    transformer = MODELS["dit"].make(attention_head_dim=8, num_embeds_ada_norm=1000)
    return DiTPipeline(
        transformer=loud(transformer), vae=vaes.kl(_LATENTS, levels=2, quant=True), scheduler=DDIMScheduler()
    )


def _inputs() -> dict[str, Any]:
    """It has no latents to give: images are compared."""
    return {"class_labels": [1, 3], "guidance_scale": 4.0, "num_inference_steps": 2, "output_type": "np"}


TINY = {"dit": TinyPipe(_make, _inputs, guidance="batch")}
