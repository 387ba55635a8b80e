"""Nucleus-Image: image queries attend to [image | text]; text has no queries.

Mixture-of-experts layers run on all tokens on every rank, because each expert selects its tokens among all of them.
"""

from lightning_cp.plans.plan import Attention, Pad, Plan, Whole, mask, split

_IMAGE = split(1, "image")
_TEXT = split(1, "text")

PLANS = {
    "NucleusMoEImageTransformer2DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": _IMAGE,
                "encoder_hidden_states": _TEXT,
                "image_rotary_emb": (split(0, "image"), split(0, "text")),
                "attention_kwargs": {
                    "attention_mask": mask("image", "text"),
                    "cached_txt_key": _TEXT,
                    "cached_txt_value": _TEXT,
                },
            }
        },
        whole={
            "transformer_blocks.*.img_mlp": Whole(
                {"hidden_states": _IMAGE, "hidden_states_unmodulated": _IMAGE}, _IMAGE, only="NucleusMoELayer"
            )
        },
        attention={"attn": Attention(("image",), ("image", "text"))},
        gather={"proj_out": _IMAGE},
        pads=(Pad("encoder_hidden_states", "encoder_hidden_states_mask"),),
        unused=("transformer_blocks.*.attn.norm_added_q.*",),
    )
}
