"""Models of pictures, without the families of FLUX."""

# fmt: off
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.tiny import Tiny, padding_mask

_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
_LATENTS = {"in_channels": 4, "out_channels": 4}
_GRID = {"height": 6, "width": 10}  # 15 tokens of 2 x 2 latents
_LARGE = {"height": 10, "width": 14}  # 35 tokens
_COGVIEW = {
    **_HEADS, **_LATENTS, "patch_size": 2, "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4,
    "pos_embed_max_size": 8, "sample_size": 8,
}
_COGVIEW4 = Tiny("CogView4Transformer2DModel", _COGVIEW, _LARGE)
_GLM = Tiny(
    "GlmImageTransformer2DModel",
    {
        **_HEADS, **_LATENTS, "patch_size": 2, "text_embed_dim": 16, "time_embed_dim": 16, "condition_dim": 8,
        "prior_vq_quantizer_codebook_size": 64,
    },
    _LARGE,
)
_HIDREAM = Tiny(
    "HiDreamImageTransformer2DModel",
    {
        **_HEADS, **_LATENTS, "patch_size": 2, "num_single_layers": 2, "caption_channels": [12, 10], "text_emb_dim": 8,
        "num_routed_experts": 3, "num_activated_experts": 2, "axes_dims_rope": (4, 2, 2), "max_resolution": (10, 14),
        "llama_layers": (0, 2, 1, 1),
    },
    {"height": 10, "width": 10, "text_2": 5},
)
_HUNYUAN_DIT = Tiny(
    "HunyuanDiT2DModel",
    {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 4, "attention_head_dim": 4,
        "num_attention_heads": 4, "cross_attention_dim": 8, "cross_attention_dim_t5": 8, "pooled_projection_dim": 4,
        "hidden_size": 16, "text_len": 7, "text_len_t5": 3,
    },
    _GRID,
)
_HUNYUAN_IMAGE = Tiny(
    "HunyuanImageTransformer2DModel",
    {
        **_HEADS, **_LATENTS, "num_single_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 2.0, "text_embed_dim": 16,
        "rope_axes_dim": (4, 4),
    },
    {"height": 3, "width": 5, "text_2": 4},
)
_JOY = {
    "patch_size": [1, 2, 2], "in_channels": 4, "hidden_size": 32, "num_attention_heads": 4, "text_dim": 16,
    "num_layers": 2, "rope_dim_list": [4, 2, 2], "theta": 256,
}
_JOYIMAGE = Tiny("JoyImageEditTransformer3DModel", _JOY, _GRID)
_JOYIMAGE_PLUS = Tiny(  # a target and references of other sizes; the second sample has less of them
    "JoyImageEditPlusTransformer3DModel", _JOY, _GRID,
    {
        "hidden_states": "float batch 19 in_channels 1 2 2",
        "shape_list": [[(1, 3, 3), (1, 2, 5)], [(1, 3, 3), (1, 1, 4)]],
    },
)
_KREA2 = Tiny(
    "Krea2Transformer2DModel",
    {
        **_HEADS, "in_channels": 16, "num_key_value_heads": 2, "intermediate_size": 32, "timestep_embed_dim": 8,
        "text_hidden_dim": 16, "num_text_layers": 3, "text_num_attention_heads": 4, "text_num_key_value_heads": 2,
        "text_intermediate_size": 16, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
        "axes_dims_rope": (4, 2, 2),
    },
    {"height": 8, "width": 8},
)
_LUMINA = {
    "sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 32, "num_layers": 2,
    "num_attention_heads": 4, "num_kv_heads": 2,
}
_LUMINA2 = Tiny(
    "Lumina2Transformer2DModel",
    {
        **_LUMINA, "num_refiner_layers": 1, "multiple_of": 2, "axes_dim_rope": (4, 2, 2), "axes_lens": (32, 16, 16),
        "cap_feat_dim": 16,
    },
    {"height": 6, "width": 12},
)
_LUMINA_NEXT = Tiny(
    "LuminaNextDiT2DModel", {**_LUMINA, "multiple_of": 16, "cross_attention_dim": 16},
    {"height": 10, "width": 10, "side": 8},
)
_NUCLEUS = {
    "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 3, "attention_head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4),
    "num_experts": 4, "moe_intermediate_dim": 16, "capacity_factors": 1.5,
    "dense_moe_strategy": "leave_first_block_dense",
}
_PRX = Tiny(
    "PRXTransformer2DModel",
    {
        "in_channels": 4, "patch_size": 2, "context_in_dim": 16, "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 4,
        "depth": 2, "axes_dim": [4, 4],
    },
    _GRID,
    {"attention_mask": "mask batch text"},
)
_QWEN21 = Tiny(
    "QwenImage21Transformer2DModel",
    {
        "in_channels": 8, "out_channels": 8, "num_layers": 2, "attention_head_dim": 12, "num_attention_heads": 4,
        "context_in_dim": 16, "axes_dims_rope": (4, 4, 4),
    },
)
SANA = {
    **_LATENTS, "num_layers": 2, "num_attention_heads": 4, "num_cross_attention_heads": 4, "caption_channels": 8,
}
_SANA = Tiny(
    "SanaTransformer2DModel",
    {
        **SANA, "patch_size": 1, "attention_head_dim": 4, "cross_attention_head_dim": 4, "cross_attention_dim": 16,
        "sample_size": 7, "qk_norm": "rms_norm_across_heads",
    },
    {"height": 7, "width": 5},
)
_Z_IMAGE = Tiny(
    "ZImageTransformer2DModel",
    {
        "in_channels": 16, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4,
        "cap_feat_dim": 16, "axes_dims": [4, 2, 2], "axes_lens": [128, 32, 32],
    },
)


def _train_cogview4(model: Any) -> None:
    """Set the processors meant for training."""
    from diffusers.models.transformers.transformer_cogview4 import CogView4TrainingAttnProcessor

    for block in model.transformer_blocks:
        block.attn1.set_processor(CogView4TrainingAttnProcessor())


def _initialise_experts(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." in name:  # the class leaves them uninitialised
            nn.init.normal_(parameter, std=0.2)


def _nucleus(sizes: dict[str, int] | None = None, inputs: dict[str, Any] | None = None, **config: Any) -> Tiny:
    kind = "NucleusMoEImageTransformer2DModel"
    return Tiny(kind, _NUCLEUS, _GRID, prepare=_initialise_experts).but(sizes, inputs, **config)


def omnigen_mask(padding: int) -> Tensor:
    """[s, s] as its pipeline makes it: text and time are causal, the image sees all; padding lies in front."""
    seen = torch.ones(25 + 18, 25 + 18, dtype=torch.float64)
    seen[:25] = seen[:25].tril()
    seen[:, :padding] = 0
    seen[:padding] = 1
    return seen


_OMNIGEN = Tiny(
    "OmniGenTransformer2DModel",
    {
        "in_channels": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 32, "num_layers": 2, "pad_token_id": 0, "vocab_size": 50, "pos_embed_max_size": 16,
        "time_step_dim": 8, "rope_scaling": {"short_factor": [1, 1.5, 2, 3], "long_factor": [2, 3, 4, 5]},
    },
    {"height": 6, "width": 12, "text": 24},
)
_TEXT, _PADDING, _IMAGE = 3, -1, 2  # Ideogram 4's indicators of tokens; padding is a segment of its own too
_IDEOGRAM4 = Tiny(  # 23 tokens; the first sample holds two segments of text and image, the second is padded in front
    "Ideogram4Transformer2DModel",
    {
        **_HEADS, "in_channels": 16, "intermediate_size": 32, "adaln_dim": 16, "llm_features_dim": 24,
        "rope_theta": 10000, "mrope_section": (2, 1, 1),
    },
    {"height": 8, "width": 8},
    {
        "segment_ids": torch.tensor([[1] * 10 + [2] * 13, [_PADDING] * 5 + [1] * 18]),
        "indicator": torch.tensor(
            [[_TEXT] * 4 + [_IMAGE] * 6 + [_TEXT] * 3 + [_IMAGE] * 10, [_PADDING] * 5 + [_TEXT] * 2 + [_IMAGE] * 16]
        ),
    },
)

TINY = {
    "auraflow": Tiny(
        "AuraFlowTransformer2DModel",
        {
            **_LATENTS, "sample_size": 16, "patch_size": 2, "num_mmdit_layers": 2, "num_single_dit_layers": 2,
            "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32,
            "joint_attention_dim": 16, "pos_embed_max_size": 64,
        },
        {**_LARGE, "text": 5},
    ),
    "cogview3_plus": Tiny("CogView3PlusTransformer2DModel", _COGVIEW, _LARGE),
    "cogview4": _COGVIEW4.but({"text": 2}),
    "cogview4_masked": _COGVIEW4.but(
        inputs={"attention_mask": padding_mask(4), "image_rotary_emb": ("float tokens attention_head_dim",) * 2}
    ),
    "cogview4_training": Tiny(
        "CogView4Transformer2DModel", _COGVIEW, _LARGE, prepare=_train_cogview4,
        inputs={
            "attention_kwargs": {
                "text_attn_mask": padding_mask(4).int(), "latent_attn_mask": padding_mask(31, 35).int(),
            }
        },
    ),
    "dit": Tiny(
        "DiTTransformer2DModel",
        {
            "in_channels": 4, "out_channels": 8, "activation_fn": "gelu-approximate", "num_attention_heads": 4,
            "attention_head_dim": 4, "attention_bias": True, "num_layers": 2, "norm_type": "ada_norm_zero",
            "num_embeds_ada_norm": 8, "patch_size": 2, "sample_size": 6,
        },
        {"height": 6, "width": 6},
    ),
    "ernie_image": Tiny(
        "ErnieImageTransformer2DModel",
        {
            **_LATENTS, "hidden_size": 32, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 32,
            "patch_size": 1, "text_in_dim": 16, "rope_axes_dim": (4, 2, 2),
        },
        {"height": 4, "width": 4},
    ),
    "glm_image": _GLM.but(inputs={"attention_mask": padding_mask(4)}),
    "glm_image_unmasked": _GLM.but({"text": 2}),
    "hidream": _HIDREAM,
    "hidream_training": Tiny(_HIDREAM.kind, _HIDREAM.config, _HIDREAM.sizes, training=True),  # so experts get gradients
    "hidream_not_square": _HIDREAM.but(_GRID, num_routed_experts=0),  # padded to 35 tokens and masked
    "hidream_short_text": _HIDREAM.but({"text": 2, "text_2": 2}),
    "hidream_tokens": _HIDREAM.but(
        inputs={
            "hidden_states": "float batch 17 16",
            "hidden_states_masks": torch.tensor([[1.0] * 15 + [0.0] * 2, [1.0] * 9 + [0.0] * 8]).double(),
            "img_ids": "float batch 17 3",
            "img_sizes": torch.tensor([[3, 5], [3, 5]]),
            "encoder_hidden_states_llama3": "list 3 float batch text_2 10",
        }
    ),
    "hunyuan_dit": _HUNYUAN_DIT.but(inputs={"style": torch.tensor([0, 0])}),
    "hunyuan_dit_controlnet": _HUNYUAN_DIT.but(
        inputs={
            "image_rotary_emb": None,
            "controlnet_block_samples": "list 2 float batch tokens hidden_size",
        },
        num_layers=6, use_style_cond_and_image_meta_size=False,
    ),
    "hunyuan_image": _HUNYUAN_IMAGE.but(text_embed_2_dim=8, guidance_embeds=True, use_meanflow=True),
    "hunyuan_image_with_frames": _HUNYUAN_IMAGE.but(
        inputs={"hidden_states": "float batch in_channels height width 1"},
        patch_size=(1, 1, 1), rope_axes_dim=(2, 2, 4),
    ),
    "hunyuan_image_short_text": _HUNYUAN_IMAGE.but({"height": 1, "width": 7, "text": 2}),
    "ideogram4": _IDEOGRAM4,
    "ideogram4_per_token_timestep": _IDEOGRAM4.but(inputs={"timestep": "time batch text+tokens"}),
    "joyimage": _JOYIMAGE,
    "joyimage_short_text": _JOYIMAGE.but({"text": 2}),
    "joyimage_items": _JOYIMAGE.but(
        inputs={"hidden_states": "float batch 3 in_channels 1 height width"}, rope_type="mrope"
    ),
    "joyimage_plus": _JOYIMAGE_PLUS,
    "joyimage_plus_short_text": _JOYIMAGE_PLUS.but({"text": 2}),
    "joyimage_plus_no_mask": _JOYIMAGE_PLUS.but(inputs={"encoder_hidden_states_mask": None}),
    "krea2": _KREA2,
    "krea2_no_mask": _KREA2.but(inputs={"encoder_attention_mask": None}),
    "lumina2": _LUMINA2,  # a mask only where a sample has fewer tokens
    "lumina2_no_mask": _LUMINA2.but(inputs={"encoder_attention_mask": torch.ones(2, 7, dtype=torch.bool)}),
    "lumina_next": _LUMINA_NEXT,
    "lumina_next_proportional": _LUMINA_NEXT.but(inputs={"cross_attention_kwargs": {"base_sequence_length": 4}}),
    "nucleus_moe": _nucleus(),
    "nucleus_moe_short_text": _nucleus(
        {"text": 2}, {"encoder_hidden_states_mask": None}, num_layers=2, use_sigmoid=True
    ),
    "nucleus_moe_dense": _nucleus(moe_enabled=False, num_layers=2),
    # Text of 24 tokens. In the first sample, 9 of them are replaced by an image, and 5 are padding.
    "omnigen": _OMNIGEN.but(
        inputs={
            "input_img_latents": ["float 1 in_channels 6 6"],
            "input_image_sizes": {0: [[8, 17]]},
            "attention_mask": torch.stack([omnigen_mask(5), omnigen_mask(0)]),
            "position_ids": torch.stack([torch.arange(-5, 38).clamp_min(0), torch.arange(43)]),
        }
    ),
    "omnigen_unconditioned": _OMNIGEN.but(
        {"text": 0},
        dict.fromkeys(("input_ids", "input_img_latents", "input_image_sizes", "attention_mask")),
    ),
    "pixart": Tiny(
        "PixArtTransformer2DModel",
        {
            "sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 2, "num_attention_heads": 4,
            "in_channels": 4, "cross_attention_dim": 8, "out_channels": 8, "attention_bias": True,
            "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 8, "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False, "norm_eps": 1e-6, "use_additional_conditions": False,
            "caption_channels": None,
        },
        _GRID,
    ),
    "prx": _PRX,
    "prx_no_mask": _PRX.but(inputs={"attention_mask": None}, resolution_embeds=True, bottleneck_size=8),
    "prx_short_text": _PRX.but({"text": 2}),
    "qwen_image": Tiny(
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 4, "joint_attention_dim": 16, "guidance_embeds": False, "axes_dims_rope": (8, 4, 4),
        },
        _GRID,
        {"encoder_hidden_states_mask": padding_mask(4)},
    ),
    # Text, a picture of 4 x 2, text with padding in the second sample, then the picture of 4 x 4 to be made.
    "qwen_image21": _QWEN21.but(
        {"text": 9},
        {
            "hidden_states": "float batch 24 in_channels",
            "img_shapes": [[(1, 4, 2), (1, 4, 4)]] * 2,
            "img_mask": "stack batch runs False 3 True 2 False 4 True 4",
            "encoder_hidden_states_mask": padding_mask(7, 9).bool(),
        },
    ),
    "qwen_image21_no_condition": _QWEN21.but({"height": 6, "width": 2, "text": 5}, causal_condition=False),
    "sana": _SANA,
    "sana_guidance": _SANA.but(
        {"height": 14, "width": 6},
        {"encoder_attention_mask": None, "controlnet_block_samples": "list 1 float batch tokens 16"},
        patch_size=2, sample_size=14, guidance_embeds=True, qk_norm=None,
    ),
    "sd3": Tiny(
        "SD3Transformer2DModel",
        {
            **_LATENTS, "sample_size": 32, "patch_size": 1, "num_layers": 3, "attention_head_dim": 8,
            "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32,
            "pooled_projection_dim": 64, "pos_embed_max_size": 96, "dual_attention_layers": (0,), "qk_norm": None,
        },
        {"height": 3, "width": 5},
    ),
    # The class pads every image and text to 32 tokens, so that sequences have 64 or 128: not divisible by 3.
    "z_image": _Z_IMAGE.but(
        inputs={
            "x": ["float 16 1 6 10", "float 16 1 10 14"],
            "cap_feats": ["float 7 16", "float 39 16"],
        }
    ),
    "z_image_controlnet": _Z_IMAGE.but(
        inputs={
            "x": ["float 16 1 6 10", "float 16 1 10 6"],
            "cap_feats": ["float 7 16", "float 13 16"],
            "controlnet_block_samples": dict.fromkeys(range(2), "float batch 64 dim"),
        }
    ),
    "z_image_omni": _Z_IMAGE.but(
        inputs={
            "x": [["float 16 1 6 10", "float 16 1 6 6"], ["float 16 1 10 6"]],
            "cap_feats": [["float 7 16", "float 5 16"], ["float 13 16"]],
            "siglip_feats": [None, None],
            "image_noise_mask": [[0, 1], [1]],
        }
    ),
    "z_image_siglip": _Z_IMAGE.but(
        inputs={
            "x": [["float 16 1 6 10", "float 16 1 6 6"], [None, "float 16 1 10 6"]],
            "cap_feats": [["float 7 16", "float 5 16"], ["float 13 16", "float 9 16", "float 3 16"]],
            "siglip_feats": [["float 3 5 8", "float 3 3 8"], [None, "float 5 3 8"]],
            "image_noise_mask": [[0, 1], [0, 1]],
        },
        siglip_feat_dim=8,
    ),
}
