"""Ideogram 4: one packed modality of text and image, with a full mask by segment and a timestep for each token."""

from lightning_cp.plans.plan import Plan, mask, patches, split

PLANS = {
    "Ideogram4Transformer2DModel": Plan(
        blocks={
            "layers": {
                "hidden_states": split(1, "image"),
                "attention_mask": mask("image"),
                "image_rotary_emb": split(1, "image"),
                "adaln_input": split(1, "image"),
            }
        },
        arguments={"final_layer": {"conditioning": split(1, "image")}},
        gather={"final_layer": split(1, "image")},
        patches=patches("image"),
        packed=("hidden_states", "timestep", "encoder_hidden_states", "position_ids", "segment_ids", "indicator"),
    )
}
