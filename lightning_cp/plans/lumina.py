"""Lumina: Next attends over the image and to replicated text; 2 over one sequence, [text | image] of each sample.

Lumina 2's refiners lie before the blocks and run whole, and so does the packing of each sample's text with its image.
"""

from lightning_cp.plans.plan import LOCAL, Attention, Plan, split

_ARGUMENTS = {
    "hidden_states": split(1, "image"),
    "attention_mask": split(1, "image"),
    "image_rotary_emb": split(1, "image"),
}

PLANS = {
    "Lumina2Transformer2DModel": Plan(blocks={"layers": _ARGUMENTS}, gather={"norm_out": split(1, "image")}),
    "LuminaNextDiT2DModel": Plan(
        blocks={"layers": _ARGUMENTS},
        attention={"attn1": Attention(("image",), mask="keys"), "attn2": LOCAL},
        gather={"norm_out": split(1, "image")},
        unused=("pad_token",),
        refused={"cross_attention_kwargs.base_sequence_length": "it scales attention by the tokens of one rank"},
    ),
}
