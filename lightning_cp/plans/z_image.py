"""Z-Image: one stream holds image and caption (and SigLIP) tokens of each sample; refiners before it run whole.

The omni mode tells noisy tokens from clean ones by a mask that goes with the tokens. Gathered in front of the final
layer, which takes that mask whole; a ControlNet may add to the last block.
"""

from lightning_cp.plans.plan import Plan, Whole, split

PLANS = {
    "ZImageTransformer2DModel": Plan(
        inputs={"controlnet_block_samples": split(1, "image")},
        blocks={
            "layers": {
                "x": split(1, "image"),
                "attn_mask": split(1, "image"),
                "freqs_cis": split(1, "image"),
                "noise_mask": split(1, "image"),
            },
        },
        whole={"all_final_layer.*": Whole({"x": split(1, "image")})},
        gather={},
    ),
}
