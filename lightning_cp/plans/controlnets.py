"""ControlNets: transformers that return a residual for each block; the residuals are gathered.

The transformer splits them again, by its own plan. Tokens are split at the blocks and not at the model's arguments,
because models insert a token for the mode (Flux) and padding (QwenImage, Z-Image) before the blocks.
"""

from lightning_cp.plans.plan import LOCAL, Attention, Pad, Plan, rows, split

_IMAGE = {"hidden_states": split(1, "image")}
_JOINT = {**_IMAGE, "encoder_hidden_states": split(1, "text")}
_FLUX = {**_JOINT, "image_rotary_emb": split(0, "text", "image")}
_RESIDUALS = {"controlnet_blocks.*": split(1, "image")}
_LINEAR = Attention(("image",), form="linear", replaces_processors=("SanaLinearAttnProcessor2_0",))

PLANS = {
    "CosmosControlNetModel": Plan(
        blocks={
            "control_blocks": {
                **_IMAGE,
                "latents": split(1, "image"),
                "embedded_timestep": split(1, "image", ndim=3),
                "temb": split(1, "image", ndim=3),
                "image_rotary_emb": split(0, "image"),
                "extra_pos_emb": split(1, "image"),
            }
        },
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather={"control_blocks.*.after_proj": split(1, "image")},
        required={"encoder_hidden_states": "without text its cross-attention would attend to the split video"},
    ),
    "FluxControlNetModel": Plan(
        blocks={"transformer_blocks": _FLUX, "single_transformer_blocks": _FLUX},
        gather={**_RESIDUALS, "controlnet_single_blocks.*": split(1, "image")},
        unused=("transformer_blocks.-1.*",),
        variants={
            ("num_single_layers", 0): Plan(blocks={"transformer_blocks": _FLUX}, gather=_RESIDUALS),
            ("num_layers", 0): Plan(
                blocks={"single_transformer_blocks": _FLUX}, gather={"controlnet_single_blocks.*": split(1, "image")}
            ),
        },
    ),
    "HunyuanDiT2DControlNetModel": Plan(
        blocks={"blocks": {**_IMAGE, "image_rotary_emb": split(0, "image")}},
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather=_RESIDUALS,
    ),
    "QwenImageControlNetModel": Plan(
        blocks={
            "transformer_blocks": {
                **_JOINT,
                "encoder_hidden_states_mask": split(1, "text"),
                "image_rotary_emb": (split(0, "image"), split(0, "text")),
            }
        },
        gather=_RESIDUALS,
        pads=(Pad("encoder_hidden_states", "encoder_hidden_states_mask"),),
        unused=("transformer_blocks.-1.*",),
    ),
    "SanaControlNetModel": Plan(
        inputs={"hidden_states": rows("image", 2, per="patch_size")},
        blocks={"transformer_blocks": {"height": rows("image"), **_IMAGE}},
        halos={"transformer_blocks.*.ff.conv_depth": (2, "image")},
        attention={"attn1": _LINEAR, "attn2": LOCAL},
        gather=_RESIDUALS,
    ),
    "SD3ControlNetModel": Plan(
        blocks={"transformer_blocks": _JOINT},
        attention={"attn": ("image", "text"), "attn2": ("image",)},
        gather=_RESIDUALS,
        unused=("transformer_blocks.-1.*",),
        variants={("joint_attention_dim", None): Plan(blocks={"transformer_blocks": _IMAGE}, gather=_RESIDUALS)},
    ),
    "ZImageControlNetModel": Plan(
        blocks={
            "control_layers": {
                "c": split(-2, "image"),
                "x": split(1, "image"),
                "attn_mask": split(1, "image"),
                "freqs_cis": split(1, "image"),
            }
        },
        gather={"control_layers.-1": split(-2, "image")},
        variants={
            ("add_control_noise_refiner", "control_layers"): "its control layers run twice, over other tokens each time"
        },
    ),
}
