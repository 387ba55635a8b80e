"""Models of videos, without those of Wan's form."""

# fmt: off
from __future__ import annotations

from typing import Any

import torch

from tests.models.pictures import SANA
from tests.models.tiny import Tiny, padding_mask

_LATENTS = {"in_channels": 4, "out_channels": 4}
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
_LONG = {"frames": 5, "height": 2, "width": 14}  # five frames of seven patches
_GRID = {"height": 6, "width": 10}  # 15 tokens of 2 x 2 latents
_ALLEGRO = Tiny(
    "AllegroTransformer3DModel",
    {
        **_LATENTS, "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": 48,
        "caption_channels": 8,
    },
    _LONG,
    {
        "encoder_attention_mask": padding_mask(4),
        "image_rotary_emb": (
            tuple((f"float {axis} attention_head_dim//3",) * 2 for axis in ("times", "rows", "columns")),
            tuple(torch.cartesian_prod(torch.arange(5), torch.arange(1), torch.arange(7)).T.reshape(3, 1, 35)),
        ),
    },
)
_COGVIDEOX = Tiny(
    "CogVideoXTransformer3DModel",
    {
        **_LATENTS, "num_attention_heads": 4, "attention_head_dim": 12, "time_embed_dim": 8, "text_embed_dim": 8,
        "num_layers": 2, "sample_width": 14, "sample_height": 2, "patch_size": 2, "temporal_compression_ratio": 4,
        "use_rotary_positional_embeddings": True,
    },
    _LONG,
)
_COSMOS = Tiny(
    "CosmosTransformer3DModel",
    {
        **_LATENTS, "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "mlp_ratio": 2,
        "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (5, 8, 16), "patch_size": (1, 2, 2),
        "rope_scale": (2.0, 1.0, 1.0), "concat_padding_mask": False, "extra_pos_embed_type": None,
    },
    _LONG,
    {"attention_mask": "mask batch text"},
)
_COSMOS3 = Tiny(  # a video of 3 x 2 x 3 tokens, whose first frame is given
    "Cosmos3OmniTransformer",
    {
        "head_dim": 12, "hidden_size": 48, "intermediate_size": 32, "latent_channel": 2, "latent_patch_size": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "patch_latent_dim": 8,
        "rope_axes_dim": [2, 2, 2], "vocab_size": 32,
    },
    {"frames": 3, "height": 4, "width": 5, "text": 5},
    {
        "vision_mse_loss_indexes": "range text+6 text+tokens",
        "vision_timesteps": torch.full((12,), 400.0, dtype=torch.float64),
        "vision_noisy_frame_indexes": ["range 1 3"],
    },
)
_SOUND = {
    "position_ids": "below 9 3 text+tokens+7",
    "sequence_length": "number text+tokens+7",
    "sound_tokens": ["float sound_dim 7"],
    "sound_token_shapes": [(7, 1, 1)],
    "sound_sequence_indexes": "range text+tokens text+tokens+7",
    "sound_mse_loss_indexes": "range text+tokens text+tokens+7",
    "sound_timesteps": torch.full((7,), 300.0, dtype=torch.float64),
    "sound_noisy_frame_indexes": ["range 7"],
}
_EASYANIMATE = Tiny(
    "EasyAnimateTransformer3DModel",
    {
        **_LATENTS, "attention_head_dim": 16, "num_attention_heads": 4, "mmdit_layers": 2, "num_layers": 2,
        "patch_size": 2, "text_embed_dim": 16, "time_embed_dim": 8,
    },
    _GRID,
)
_VIDEO = {
    **_LATENTS, "num_attention_heads": 4, "attention_head_dim": 10, "num_layers": 1, "num_single_layers": 1,
    "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "guidance_embeds": True, "text_embed_dim": 16,
    "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4), "image_condition_type": None,
}
_HUNYUAN = Tiny("HunyuanVideoTransformer3DModel", _VIDEO, {"height": 3, "width": 5})
_TOKEN_REPLACE = _HUNYUAN.but(
    {"frames": 3, "height": 1, "width": 7}, image_condition_type="token_replace", num_layers=2, num_single_layers=2
)
_FRAMEPACK = Tiny(  # 53 tokens: histories of 2, 6 and 30, and the video's 15
    "HunyuanVideoFramepackTransformer3DModel",
    {**_VIDEO, "patch_size": 2, "has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True},
    {**_GRID, "images": 5, "history": 4},
)
_VIDEO15 = Tiny(
    "HunyuanVideo15Transformer3DModel",
    {
        **_HEADS, **_LATENTS, "num_refiner_layers": 1, "mlp_ratio": 2.0, "text_embed_dim": 16, "text_embed_2_dim": 8,
        "image_embed_dim": 12, "rope_axes_dim": (2, 2, 4),
    },
    {"height": 3, "width": 5, "text_2": 3, "images": 3},
)
_KANDINSKY: dict[str, Any] = {
    "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 16, "model_dim": 32,
    "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (2, 2, 4),
}
_KANDINSKY6 = Tiny(
    "Kandinsky6Transformer3DModel",
    {
        **_KANDINSKY, "in_audio_dim": 6, "out_audio_dim": 6, "visual_cond": False, "ca_rope": True,
        "cross_gates": True, "fix_modulation": True,
    },
    {**_GRID, "audio": 10},  # for 3 patches on 3 ranks
)
_LATTE = Tiny(
    "LatteTransformer3DModel",
    {
        **_HEADS, "sample_size": 14, "patch_size": 2, "caption_channels": 8, "in_channels": 4,
        "cross_attention_dim": 32, "out_channels": 8, "attention_bias": True, "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single", "norm_elementwise_affine": False,
        "norm_eps": 1e-6, "video_length": 3,
    },
    {"frames": 3, "height": 10, "width": 14},
    # The mask is a bias for each frame.
    {"encoder_attention_mask": (padding_mask(4).double() - 1).mul(1e4)[:, None].repeat_interleave(3, 0)},
)
_LTX = {**_HEADS, **_LATENTS, "cross_attention_dim": 32, "qk_norm": "rms_norm_across_heads", "caption_channels": 16}
_LTX_VIDEO = Tiny("LTXVideoTransformer3DModel", _LTX, {"height": 3, "width": 5})
_COORDS = {"hidden_states": "float batch 25 in_channels", "video_coords": "time batch 3 25"}
_LTX2 = Tiny(
    "LTX2VideoTransformer3DModel",
    {
        **_LTX, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 4,
        "audio_attention_head_dim": 4, "audio_cross_attention_dim": 16,
    },
    {"frames": 5, "width": 5, "audio": 11},
    {"fps": 25.0},
)
# The additions after LTX-2.0: timesteps of tokens, coordinates, keyframes, a perturbed block.
_NEWER = _LTX2.but(
    inputs={
        "encoder_hidden_states": "float batch text 32",
        "timestep": "step batch tokens",
        "audio_timestep": "step batch audio",
        "sigma": "step batch",
        "video_coords": lambda g: 9 * torch.rand(2, 3, 25, 2, generator=g).double(),
        "audio_coords": "time batch 1 audio 2",
        "video_keyframes_mask": "below 2 batch tokens 1",
        "spatio_temporal_guidance_blocks": [1],
        "perturbation_mask": torch.tensor([0.0, 1.0], dtype=torch.float64),
    },
    gated_attn=True, cross_attn_mod=True, audio_gated_attn=True, audio_cross_attn_mod=True, rope_type="split",
    perturbed_attn=True, use_prompt_embeddings=False, use_keyframes_abs_pos_embedding=True,
)
_REFINER = Tiny("SanaWMLTX2RefinerTransformer3DModel", _LTX2.config, {"frames": 5, "width": 5})
_MOCHI = Tiny(
    "MochiTransformer3DModel",
    {
        "patch_size": 2, "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 3,
        "pooled_projection_dim": 16, "in_channels": 4, "text_embed_dim": 16, "time_embed_dim": 4,
        "max_sequence_length": 16,
    },
    _LONG,
)
_MOTIF = Tiny(
    "MotifVideoTransformer3DModel",
    {
        **_LATENTS, "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "num_single_layers": 4,
        "num_decoder_layers": 2, "mlp_ratio": 2.0, "patch_size": 1, "text_embed_dim": 16, "image_embed_dim": 8,
        "rope_axes_dim": (4, 4, 4), "enable_text_cross_attention_dual": True,
        "enable_text_cross_attention_single": True,
    },
    {"frames": 3, "width": 5},
    {"encoder_attention_mask": padding_mask(4), "image_embeds": "float batch 5 image_embed_dim"},
)


def kandinsky5_nabla(frames: int = 1, width: int = 5, **sparse: Any) -> Tiny:
    """Kandinsky 5 with `sparse_params`: frames of 1 x `width` blocks."""
    mask = torch.eye(frames * width, dtype=torch.bool)[None, None]
    return Tiny(
        "Kandinsky5Transformer3DModel", _KANDINSKY, {"frames": frames, "height": 16, "width": 16 * width},
        {"sparse_params": {"sta_mask": mask, "to_fractal": True, "P": 0.5, **sparse}},
    )


def _packed() -> dict[str, Any]:
    """One video row to condition on, then text and audio in turns, then video, then audio again."""
    video, text, audio = torch.tensor([0, *range(9, 18)]), torch.tensor([1, 2, 3, 5]), torch.tensor([4, 6, 7, 8, 18])
    tags = torch.zeros(19, dtype=torch.long)
    tags[text], tags[audio] = 1, 2
    return {
        "timestep": torch.tensor([0.7, 0.3], dtype=torch.float64),
        "timestep_indices": torch.tensor([1] + [0] * 3 + [1, 0, 1, 1, 1] + [0] * 9 + [1]),
        "token_tags": tags,
        "position_ids": lambda g: torch.randint(0, 9, (19, 3), generator=g).double(),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


TINY = {
    "allegro": _ALLEGRO,
    "allegro_masked": _ALLEGRO.but(
        inputs={"attention_mask": padding_mask(3, 5)[:, :, None, None].expand(2, 5, 2, 14)}
    ),
    "cogvideox": _COGVIDEOX.but(
        {"frames": 1, **_GRID}, attention_head_dim=8, time_embed_dim=2, sample_width=10, sample_height=6,
        sample_frames=1, max_text_seq_length=7,
    ),
    "cogvideox_1_5": _COGVIDEOX.but(
        {"frames": 10, "text": 2}, patch_size_t=2, ofs_embed_dim=8, patch_bias=False
    ),
    "cogvideox_masked": _COGVIDEOX.but(
        inputs={"attention_kwargs": {"attention_mask": torch.cat([padding_mask(4), padding_mask(30, 35)], 1).bool()}},
        use_rotary_positional_embeddings=False, sample_frames=17, max_text_seq_length=7,
    ),
    "consisid": Tiny("ConsisIDTransformer3DModel", _COGVIDEOX.config, {**_LONG, "images": 5}).but(
        is_train_face=True, cross_attn_interval=1, cross_attn_dim_head=8, cross_attn_num_heads=2, LFE_id_dim=6,
        LFE_vit_dim=8, LFE_depth=2, LFE_dim_head=8, LFE_num_heads=2, LFE_num_id_token=2, LFE_num_querie=3,
        LFE_output_dim=32, LFE_ff_mult=1, LFE_num_scale=2,
    ),
    "cosmos": _COSMOS.but(extra_pos_embed_type="learnable"),
    "cosmos_per_frame_timestep": _COSMOS.but(
        inputs={
            "hidden_states": "float batch 4 frames height width",
            "timestep": "time batch 1 frames 1 1",
            "condition_mask": "time batch 1 frames height width",
        },
        in_channels=5,
    ),
    "cosmos_transfer": _COSMOS.but(
        inputs={
            "encoder_hidden_states": ("float batch text 10", "float batch 5 6"),
            "attention_mask": None,
            "block_controlnet_hidden_states": "list 2 float batch tokens 48",
        },
        use_crossattn_projection=True, crossattn_proj_in_channels=10, encoder_hidden_states_channels=16,
        controlnet_block_every_n=1, img_context_dim_in=6, img_context_dim_out=48,
    ),
    "cosmos3": _COSMOS3,
    "cosmos3_short_text": _COSMOS3.but({"text": 2}),
    "cosmos3_nemotron": _COSMOS3.but(hidden_act="relu2", qk_norm_for_text=False, use_und_k_norm_for_gen=True),
    "cosmos3_sound": _COSMOS3.but(inputs=_SOUND, sound_gen=True, sound_dim=6),
    "easyanimate": _EASYANIMATE,
    "easyanimate_short_text": _EASYANIMATE.but({"text": 2}),
    "easyanimate_shared_weights": _EASYANIMATE.but(
        {"text": 4, "text_2": 3},
        {
            "hidden_states": "float batch 4 frames height width",
            "inpaint_latents": "float batch 3 frames height width",
            "control_latents": "float batch 1 frames height width",
        },
        mmdit_layers=1, in_channels=8, text_embed_dim_t5=8, after_norm=True,
    ),
    "hunyuan_video": _HUNYUAN,
    "hunyuan_video_short_text": _HUNYUAN.but({"text": 2}),
    "hunyuan_video_token_replace": _TOKEN_REPLACE,
    "hunyuan_video_token_replace_short_text": _TOKEN_REPLACE.but({"frames": 7, "width": 1, "text": 2}),
    "framepack": _FRAMEPACK,
    "framepack_one_sample": _FRAMEPACK.but({"batch": 1}),  # its text is cut to the length of its mask
    "hunyuan_video15": _VIDEO15,
    "hunyuan_video15_text_to_video": _VIDEO15.but(
        {"text": 2}, {"image_embeds": torch.zeros(2, 3, 12, dtype=torch.float64)}, use_meanflow=True
    ),
    "kandinsky5": Tiny("Kandinsky5Transformer3DModel", _KANDINSKY, _GRID),
    "kandinsky6": _KANDINSKY6,
    "kandinsky6_other_widths": _KANDINSKY6.but(
        {"audio": 5}, ca_rope=False, cross_gates=False, fix_modulation=False, model_dim_a=16, ff_dim_a=24,
        axes_dims_a=(2, 2, 0),
    ),
    "kandinsky6_without_audio": _KANDINSKY6.but(inputs={"audio_hidden_states": None}),
    "kandinsky6_sr": Tiny(
        "Kandinsky6SRTransformer3DModel",
        {
            "in_visual_dim": 2, "out_visual_dim": 4, "time_dim": 16, "model_dim": 32, "ff_dim": 32,
            "num_visual_blocks": 2, "axes_dims": (2, 2, 4), "nabla_threshold": 0.5, "nabla_window": (1, 1, 1),
        },
        {"height": 8, "width": 40},
    ),
    "latte": _LATTE,
    "latte_spatial": _LATTE.but(inputs={"enable_temporal_attentions": False}),
    "ltx": _LTX_VIDEO,
    "ltx_per_token_timestep": _LTX_VIDEO.but(inputs={**_COORDS, "timestep": "step batch 25"}),
    "ltx_timestep_column": _LTX_VIDEO.but(inputs={**_COORDS, "timestep": "step batch 25 1"}),  # of long prompts
    "ltx2": _LTX2,
    "ltx2_per_token_timestep": _LTX2.but(inputs={"timestep": "step batch tokens", "audio_timestep": "step batch"}),
    "ltx2_timestep_columns": _LTX2.but(
        inputs={"timestep": "step batch tokens 1", "audio_timestep": "step batch audio 1"}
    ),
    "ltx2_self_attention_mask": _LTX2.but(
        inputs={"video_self_attention_mask": lambda g: torch.rand(2, 25, 25, generator=g).round()}
    ),
    "ltx2_newer": _NEWER,
    "ltx2_cross_timestep": _NEWER.but(
        inputs={"use_cross_timestep": True, "perturbation_mask": None},
        use_prompt_adaln_single=False, audio_cross_attn_mod=False,
    ),
    "ltx2_isolated": _LTX2.but(inputs={"isolate_modalities": True}),
    "sana_wm_refiner": _REFINER,
    "sana_wm_refiner_split_rope": _REFINER.but(
        inputs={"video_rotary_emb": ("float batch num_attention_heads tokens attention_head_dim//2",) * 2},
        rope_type="split", gated_attn=True,
    ),
    "minimax_h3": Tiny(
        "MiniMaxH3Transformer3DModel",
        {
            "num_attention_heads": 4, "attention_head_dim": 16, "hidden_size": 24, "num_layers": 2,
            "num_refiner_layers": 2, "ffn_dim": 32, "in_channels": 4, "audio_in_channels": 6, "patch_size": (1, 2, 2),
            "text_dim": 8, "freq_dim": 8, "time_embed_hidden_dim": 24, "time_embed_dim": 16, "rope_freq_dim": 2,
        },
        {"frames": 5, "height": 2, "width": 4, "text": 4, "audio": 5},
        _packed(),
    ),
    "mochi": _MOCHI,
    "mochi_short_text": _MOCHI.but({"text": 2}),
    "motif_video": _MOTIF,
    "motif_video_short_text": _MOTIF.but({"text": 2}, {"encoder_attention_mask": padding_mask(1, 2)}),
    "motif_video_without_mask": _MOTIF.but(
        inputs={"encoder_attention_mask": None, "image_embeds": None}, image_embed_dim=None, num_single_layers=2,
        num_decoder_layers=0, enable_text_cross_attention_dual=False, enable_text_cross_attention_single=False,
    ),
    "sana_video": Tiny(
        "SanaVideoTransformer3DModel",
        {
            **SANA, "attention_head_dim": 12, "cross_attention_head_dim": 12, "cross_attention_dim": 48,
            "sample_size": 6, "patch_size": (1, 2, 2), "rope_max_seq_len": 32,
        },
        {"frames": 7, "height": 6, "width": 4},
    ),
}
