"""Helios: self-attention over [history | image], cross-attention of both or of the image alone on replicated text.

Blocks and the last norm, which drops the history, find the image by how many tokens it has.
"""

from dataclasses import replace

from lightning_cp.plans.plan import LOCAL, Plan, Spec, count, split

_ARGUMENTS: dict[str, Spec] = {
    "original_context_length": count("image"),  # first: the rest is history
    "hidden_states": split(1, "history", "image"),
    "temb": split(1, "history", "image"),
}

_HELIOS = Plan(
    blocks={"blocks": {**_ARGUMENTS, "rotary_emb": split(1, "history", "image")}},
    arguments={"norm_out": _ARGUMENTS},
    attention={"attn1": ("history", "image"), "attn2": LOCAL},
    gather={"proj_out": split(1, "image")},
    unused=("patch_short.*", "patch_mid.*", "patch_long.*"),
)

PLANS = {
    # What amplifies history has no gradient on a rank without any.
    "HeliosTransformer3DModel": replace(
        _HELIOS, variants={("is_amplify_history", True): replace(_HELIOS, needed=("history",))}
    ),
}
