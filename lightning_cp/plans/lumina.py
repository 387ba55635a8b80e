"""Lumina: Next has self-attention over the image and cross-attention on replicated text; Lumina 2 joint attention.

Lumina 2 packs each sample as one sequence [text | image]. Packing and the refiners get whole tokens, before the blocks.
In proportional attention of Lumina-Next, the scale depends on the number of tokens, so the engine computes it.
"""

from lightning_cp.plans.plan import LOCAL, Attention, Plan, kept, patches, split

_BASE = "base_sequence_length"

_ARGUMENTS = {
    "hidden_states": split(1, "image"),
    "attention_mask": split(1, "image"),
    "image_rotary_emb": split(1, "image"),
}

PLANS = {
    "Lumina2Transformer2DModel": Plan(
        blocks={"layers": _ARGUMENTS},
        gather={"norm_out": split(1, "image")},
        patches=patches(
            "image", once=("context_refiner.*", "noise_refiner.*"), masks=("encoder_attention_mask",), overlaps=False
        ),
    ),
    "LuminaNextDiT2DModel": Plan(
        blocks={"layers": {**_ARGUMENTS, "cross_attention_kwargs": {_BASE: kept(_BASE)}}},
        attention={"attn1": Attention(("image",), mask="keys", log_base=_BASE), "attn2": LOCAL},
        gather={"norm_out": split(1, "image")},
        unused=("pad_token",),
        patches=patches("image"),
    ),
}
