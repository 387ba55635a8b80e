"""AuraFlow: joint attention; register tokens precede the text, and single blocks get one tensor of both shards."""

from lightning_cp.plans.plan import Plan, patches, split

PLANS = {
    "AuraFlowTransformer2DModel": Plan(
        blocks={
            "joint_transformer_blocks": {"hidden_states": split(1, "image"), "encoder_hidden_states": split(1, "text")},
            "single_transformer_blocks": {},
        },
        gather={"proj_out": split(1, "image")},
        patches=patches("text", "image"),
    )
}
