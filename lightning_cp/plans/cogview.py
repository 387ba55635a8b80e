"""CogView3-Plus and CogView4: joint attention; CogView4 builds a full mask (queries and keys) from its text mask.

`CogView4TrainingAttnProcessor` takes the masks of both modalities from `attention_kwargs`.
"""

from lightning_cp.plans.plan import Attention, Plan, patches, split

PLANS = {
    "CogView3PlusTransformer2DModel": Plan(
        blocks={"transformer_blocks": {"hidden_states": split(1, "image"), "encoder_hidden_states": split(1, "text")}},
        gather={"proj_out": split(1, "image")},
        patches=patches("text", "image"),
    ),
    "CogView4Transformer2DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "encoder_hidden_states": split(1, "text"),
                "image_rotary_emb": split(0, "image"),
                "attention_mask": split(1, "text"),
                "attention_kwargs": {"text_attn_mask": split(1, "text"), "latent_attn_mask": split(1, "image")},
            }
        },
        attention={"attn1": Attention(("text", "image"), mask="outer")},
        gather={"proj_out": split(1, "image")},
        refused={
            "attention_kwargs.batch_flag": "it packs several samples into one sequence, and each would have to be split"
        },
        patches=patches("text", "image"),
    ),
}
