"""JoyImage Edit and Edit Plus: joint attention.

Rotary positions: in Edit for the image, and optionally the text; in Edit Plus for the image only, one set per sample.
"""

from lightning_cp.plans.plan import Plan, mask, patches, split

_TOKENS = {"hidden_states": split(1, "image"), "encoder_hidden_states": split(1, "text")}
_UNUSED = ("double_blocks.-1.attn.txt_attn_proj.*", "double_blocks.-1.txt_mlp.*")

PLANS = {
    "JoyImageEditTransformer3DModel": Plan(
        blocks={"double_blocks": {**_TOKENS, "image_rotary_emb": (split(0, "image"), split(0, "text"))}},
        gather={"proj_out": split(1, "image")},
        unused=_UNUSED,
        patches=patches("image", "text", once=("condition_embedder.text_embedder",)),
    ),
    "JoyImageEditPlusTransformer3DModel": Plan(
        blocks={
            "double_blocks": {**_TOKENS, "image_rotary_emb": split(1, "image"), "attention_mask": mask("image", "text")}
        },
        gather={"proj_out": split(1, "image")},
        unused=_UNUSED,
        patches=patches("image", "text", once=("condition_embedder.text_embedder",)),
    ),
}
