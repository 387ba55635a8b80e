"""Helios: self-attention over [history | image]; both, or the image alone, cross-attend to replicated text.

The blocks and the last norm locate the image by its number of tokens. The last norm drops the history.
"""

from dataclasses import replace

from lightning_cp.plans.plan import LOCAL, Plan, Spec, count, patches, split

_ARGUMENTS: dict[str, Spec] = {
    "original_context_length": count("image"),  # listed first: all other tokens are history
    "hidden_states": split(1, "history", "image"),
    "temb": split(1, "history", "image"),
}

_HELIOS = Plan(
    blocks={"blocks": {**_ARGUMENTS, "rotary_emb": split(1, "history", "image")}},
    arguments={"norm_out": _ARGUMENTS},
    attention={"attn1": ("history", "image"), "attn2": LOCAL},
    gather={"proj_out": split(1, "image")},
    unused=("patch_short.*", "patch_mid.*", "patch_long.*"),
    patches=patches("history", "image", once=("condition_embedder.text_embedder",)),
)

PLANS = {
    # The parameters that amplify history get no gradient on a rank without history tokens.
    "HeliosTransformer3DModel": replace(
        _HELIOS, variants={("is_amplify_history", True): replace(_HELIOS, needed=("history",))}
    )
}
