"""Z-Image: the image and caption (and SigLIP) tokens of a sample are one modality; the refiners run on whole tokens.

In omni mode a per-token mask, split with the tokens, separates noisy tokens from clean ones. Tokens are gathered before
the final layer, which needs the whole mask, and not at the last block, because a ControlNet may add to its output.
"""

from lightning_cp.plans.plan import Plan, Whole, patches, split

PLANS = {
    "ZImageTransformer2DModel": Plan(
        inputs={"controlnet_block_samples": split(1, "image")},
        blocks={
            "layers": {
                "x": split(1, "image"),
                "attn_mask": split(1, "image"),
                "freqs_cis": split(1, "image"),
                "noise_mask": split(1, "image"),
            }
        },
        whole={"all_final_layer.*": Whole({"x": split(1, "image")})},
        gather={},
        patches=patches(
            "image", once=("noise_refiner.*", "context_refiner.*", "siglip_refiner.*"), multiple=32, overlaps=False
        ),
    )
}
