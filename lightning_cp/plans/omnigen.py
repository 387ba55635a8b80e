"""OmniGen: one modality of text, input images, time and image, with a full mask (text causal, images bidirectional)."""

from lightning_cp.plans.plan import Batch, Plan, mask, patches, split

PLANS = {
    "OmniGenTransformer2DModel": Plan(
        blocks={
            "layers": {
                "hidden_states": split(1, "image"),
                "attention_mask": mask("image"),
                "image_rotary_emb": split(0, "image"),
            }
        },
        gather={"norm": split(1, "image")},
        unused=("embed_tokens.*", "patch_embedding.input_image_proj.*"),
        patches=patches("image"),
        batch=Batch(
            "input_image_sizes",
            whole=("position_ids",),  # those of the first sample are used
            images=("input_image_sizes", "input_img_latents"),
        ),
    )
}
