"""Latte: blocks over the patches of a frame, by turns with blocks over the frames of a patch.

Patches are split, so that the latter stay on their rank; there patches are rows of the batch, timesteps with them.
"""

from lightning_cp.plans.plan import LOCAL, Plan, split

PLANS = {
    "LatteTransformer3DModel": Plan(
        blocks={
            "transformer_blocks": {"hidden_states": split(1, "image")},
            "temporal_transformer_blocks": {"timestep": split(0, "image", folded=True)},
        },
        attention={"temporal_transformer_blocks.attn1": LOCAL, "attn2": LOCAL},
        gather={"proj_out": split(1, "image")},
        unused=("temporal_transformer_blocks.*",),
    ),
}
