"""Latte: alternating blocks over the patches of a frame (spatial) and over the frames of a patch (temporal).

Patches are split, so temporal attention is local. In temporal blocks patches are folded into the batch dim, and so are
the timesteps.
"""

from lightning_cp.plans.plan import LOCAL, Plan, patches, split

PLANS = {
    "LatteTransformer3DModel": Plan(
        blocks={
            "transformer_blocks": {"hidden_states": split(1, "image")},
            "temporal_transformer_blocks": {"timestep": split(0, "image", folded=True)},
        },
        attention={"temporal_transformer_blocks.attn1": LOCAL, "attn2": LOCAL},
        gather={"proj_out": split(1, "image")},
        unused=("temporal_transformer_blocks.*",),
        patches=patches("image", once=("caption_projection",), alternate=True),
    )
}
