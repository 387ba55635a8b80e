"""Tiny models for which diffusers has a plan."""

from __future__ import annotations

from dataclasses import replace

from tests.models import TINY
from tests.models.tiny import Tiny

_NAMES = ("flux", "flux2", "qwen_image", "wan", "wan_per_token_timestep", "ltx", "wan_image_to_video", "chronoedit")
THEIR_PLANS: dict[str, Tiny] = {
    **{name: TINY[name] for name in _NAMES},
    "helios": replace(TINY["helios"], config={**TINY["helios"].config, "num_layers": 40}),  # the plan names this many
    "ltx2": TINY["ltx2_isolated"],  # their plan leaves cross_attn_rope whole, which only this does not use
    "minimax_h3": TINY["minimax_h3"],
}
