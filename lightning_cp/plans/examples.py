"""The example inputs of each class: what a call of its pipeline passes, as far as a forward needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_cp.plans.example_inputs import ExampleInputs


def _text(width: str, **others: str) -> dict[str, str]:
    return {"encoder_hidden_states": f"float batch text {width}", **others}


_MASK = {"encoder_attention_mask": "mask batch text"}
_INT_MASK = {"encoder_attention_mask": "int_mask batch text"}
_SCALE = {"guidance": "float batch"}
_GUIDED = {"guidance": "guidance_embeds"}
_POOLED = {"pooled_projections": "float batch pooled_projection_dim"}
_IDS = {"img_ids": "float tokens 3", "txt_ids": "float text 3"}
_LATENTS = {"hidden_states": "float batch tokens in_channels"}
_PACKED = {**_LATENTS, **_text("joint_attention_dim", timestep="time batch")}
_PICTURE = {"hidden_states": "float batch in_channels height width"}
_CLIP = {"hidden_states": "float batch in_channels frames height width", "timestep": "step batch"}
_SOUND = {"hidden_states": "float batch in_channels audio", "timestep": "time batch"}
_GRID = {"num_frames": "number frames", "height": "number height", "width": "number width"}
_SIZE = dict.fromkeys(("original_size", "target_size", "crop_coords"), "below 99 batch 2")
_IMAGE = {"encoder_hidden_states_image": "float batch images image_dim"}
_IF_IMAGE, _IMAGES = {"encoder_hidden_states_image": "image_dim"}, {"images": 257}


def _wan(**others: Any) -> ExampleInputs:
    return ExampleInputs({**_CLIP, **_text("text_dim"), **_IMAGE, **others}, _IF_IMAGE, sizes=_IMAGES)


def _history(batch: str = "", **frames: str) -> dict[str, str]:
    """Latents of earlier frames, and their positions.

    Args: batch: "batch " if each sample has positions. frames: number of frames, by the end of the names.
    """
    latents = {f"latents_{x}": f"float batch in_channels {n} height width" for x, n in frames.items()}
    return {**latents, **{f"indices_latents_{x}": f"float {batch}{n}" for x, n in frames.items()}}


_VIDEO = ExampleInputs(
    {**_CLIP, **_text("text_embed_dim", encoder_attention_mask="float_mask batch text"), **_POOLED, **_SCALE}, _GUIDED
)
_TEXT_2 = {
    "encoder_hidden_states_2": "float batch text_2 text_embed_2_dim",
    "encoder_attention_mask_2": "float_mask batch text_2",
    "timestep_r": "time batch",
}
_IF_TEXT_2 = {**dict.fromkeys(list(_TEXT_2)[:2], "text_embed_2_dim"), "timestep_r": "use_meanflow"}
_COGVIEW = ExampleInputs({**_PICTURE, **_text("text_embed_dim", timestep="step batch"), **_SIZE})
_COGVIDEOX = {
    "hidden_states": "float batch frames in_channels height width",
    **_text("text_embed_dim", timestep="step batch"),
    "image_rotary_emb": ("float tokens attention_head_dim",) * 2,
    "ofs": "float 1",
}
_IF_COGVIDEOX = {"image_rotary_emb": "use_rotary_positional_embeddings", "ofs": "ofs_embed_dim"}
_IF_FACE = dict.fromkeys(("id_cond", "id_vit_hidden"), "is_train_face")
_HELIOS = _history("batch ", history_short="short", history_mid="mid", history_long="long")
_KANDINSKY = {
    "hidden_states": "float batch frames height width (2*in_visual_dim+1)if(visual_cond)else(in_visual_dim)",
    **_text("in_text_dim", timestep="time batch"),
    "pooled_projections": "float batch in_text_dim2",
}

EXAMPLES: Mapping[str, ExampleInputs] = {
    "AceStepTransformer1DModel": ExampleInputs(
        {
            "hidden_states": "float batch audio audio_acoustic_hidden_dim",
            "context_latents": "float batch audio 2*audio_acoustic_hidden_dim",
            **_text("(encoder_hidden_size)or(hidden_size)", timestep="time batch", timestep_r="time batch"),
        }
    ),
    "AllegroTransformer3DModel": ExampleInputs(
        {
            **_CLIP,
            **_text("caption_channels", **_MASK),
            "image_rotary_emb": (
                tuple((f"float {axis} attention_head_dim//3",) * 2 for axis in ("times", "rows", "columns")),
                tuple(f"below {axis} 1 tokens" for axis in ("times", "rows", "columns")),
            ),
        }
    ),
    "AnyFlowTransformer3DModel": ExampleInputs(
        {
            "hidden_states": "float batch frames in_channels height width",
            **_text("text_dim", timestep="time batch frames", r_timestep="time batch frames"),
            **_IMAGE,
        },
        _IF_IMAGE,
        sizes=_IMAGES,
    ),
    "AuraFlowTransformer2DModel": ExampleInputs({**_PICTURE, **_text("joint_attention_dim", timestep="time batch")}),
    "BriaFibo2Transformer2DModel": ExampleInputs(
        {
            **_PICTURE,
            "encoder_hidden_states": "float batch 1+len(injection_layer_ids) text cap_feat_dim",
            "timestep": "time batch",
        }
    ),
    "BriaFiboTransformer2DModel": ExampleInputs(
        {
            **_PACKED,
            **_IDS,
            "text_encoder_layers": "list num_layers+num_single_layers float batch text text_encoder_dim",
        },
        patch=1,
        space=16,
    ),
    "BriaTransformer2DModel": ExampleInputs({**_PACKED, **_IDS, **_SCALE}, _GUIDED, patch=2),
    "ChromaTransformer2DModel": ExampleInputs({**_PACKED, **_IDS}, patch=2),
    "ChronoEditTransformer3DModel": _wan(),
    "CogVideoXTransformer3DModel": ExampleInputs(_COGVIDEOX, _IF_COGVIDEOX),
    "CogView3PlusTransformer2DModel": _COGVIEW,
    "CogView4Transformer2DModel": _COGVIEW,
    "ConsisIDTransformer3DModel": ExampleInputs(
        {
            **_COGVIDEOX,
            "id_cond": "float batch LFE_id_dim",
            "id_vit_hidden": "list LFE_num_scale float batch images LFE_vit_dim",
        },
        _IF_COGVIDEOX | _IF_FACE,
        sizes={"images": 577},
    ),
    "Cosmos3OmniTransformer": ExampleInputs(
        {
            "input_ids": "below vocab_size text",
            "text_indexes": "range text",
            "position_ids": "below 9 3 text+tokens",
            "und_len": "number text",
            "sequence_length": "number text+tokens",
            "vision_tokens": ["float 1 latent_channel frames height width"],
            "vision_token_shapes": ["shape frames rows columns"],
            "vision_sequence_indexes": "range text text+tokens",
            "vision_mse_loss_indexes": "range text text+tokens",
            "vision_timesteps": "step tokens",
            "vision_noisy_frame_indexes": ["range frames"],
        },
        patch="latent_patch_size",
        space=16,
    ),
    "CosmosTransformer3DModel": ExampleInputs(
        {**_CLIP, **_text("text_embed_dim", timestep="time batch"), "padding_mask": "ones 1 1 height width", "fps": 24},
        {"padding_mask": "concat_padding_mask"},
    ),
    "DiTTransformer2DModel": ExampleInputs(
        {**_PICTURE, "timestep": "step batch", "class_labels": "below num_embeds_ada_norm batch"}
    ),
    "EasyAnimateTransformer3DModel": ExampleInputs(
        {**_CLIP, **_text("text_embed_dim"), "encoder_hidden_states_t5": "float batch text_2 text_embed_dim_t5"},
        {"encoder_hidden_states_t5": "text_embed_dim_t5"},
        sizes={"text_2": 256},
    ),
    "ErnieImageTransformer2DModel": ExampleInputs(
        {
            **_PICTURE,
            "timestep": "step batch",
            "text_bth": "float batch text text_in_dim",
            "text_lens": "lengths batch text",
        },
        space=16,
    ),
    "Flux2Transformer2DModel": ExampleInputs(
        {**_PACKED, **_SCALE, "img_ids": "float batch tokens 4", "txt_ids": "float batch text 4"}, _GUIDED, patch=2
    ),
    "Flux3Transformer2DModel": ExampleInputs(
        {**_PACKED, "img_ids": "float tokens 4", "txt_ids": "float text 4", "target_timestep": "time batch"},
        {"target_timestep": "flow_map"},
        patch=2,
    ),
    "FluxTransformer2DModel": ExampleInputs({**_PACKED, **_POOLED, **_IDS, **_SCALE}, _GUIDED, patch=2),
    "GlmImageTransformer2DModel": ExampleInputs(
        {
            **_PICTURE,
            **_text("text_embed_dim", timestep="step batch"),
            "prior_token_id": "below prior_vq_quantizer_codebook_size batch tokens",
            "prior_token_drop": "flags batch tokens",
            "target_size": "float batch 2",
            "crop_coords": "float batch 2",
        }
    ),
    "HeliosTransformer3DModel": ExampleInputs(
        {**_CLIP, **_text("text_dim"), "indices_hidden_states": "float batch frames", **_HELIOS},
        dict.fromkeys(_HELIOS, "has_multi_term_memory_patch"),
        sizes={"short": 1, "mid": 2, "long": 16},
    ),
    "HiDreamImageTransformer2DModel": ExampleInputs(
        {
            **_PICTURE,
            "encoder_hidden_states_t5": "float batch text caption_channels[0]",
            "encoder_hidden_states_llama3": "float max(llama_layers)+1 batch text_2 caption_channels[1]",
            "pooled_embeds": "float batch text_emb_dim",
            "timesteps": "step batch",
        },
        sizes={"text_2": 128},
    ),
    "HunyuanDiT2DModel": ExampleInputs(
        {
            **_PICTURE,
            "timestep": "time batch",
            "encoder_hidden_states": "float batch text_len cross_attention_dim",
            "text_embedding_mask": "int_mask batch text_len",
            "encoder_hidden_states_t5": "float batch text_len_t5 cross_attention_dim_t5",
            "text_embedding_mask_t5": "int_mask batch text_len_t5",
            "image_meta_size": "float batch 6",
            "style": "below 1 batch",
            "image_rotary_emb": ("float tokens attention_head_dim",) * 2,
        }
    ),
    "HunyuanImageTransformer2DModel": ExampleInputs(
        {**_PICTURE, **_text("text_embed_dim", timestep="time batch", **_INT_MASK), **_TEXT_2, **_SCALE},
        _IF_TEXT_2 | _GUIDED,
        space=32,
        sizes={"text_2": 128},
    ),
    "HunyuanVideo15Transformer3DModel": ExampleInputs(
        {
            **_CLIP,
            **_text("text_embed_dim", timestep="time batch", encoder_attention_mask="float_mask batch text"),
            **_TEXT_2,
            "image_embeds": "float batch images image_embed_dim",
        },
        _IF_TEXT_2,
        space=16,
        sizes={"text_2": 256, "images": 729},
    ),
    "HunyuanVideoFramepackTransformer3DModel": ExampleInputs(
        {
            **_VIDEO.inputs,
            "image_embeds": "float batch images image_proj_dim",
            "indices_latents": "float frames",
            **_history(clean="2", history_2x="2", history_4x="history"),
        },
        {
            **_GUIDED,
            "image_embeds": "has_image_proj",
            **dict.fromkeys(_history(clean="", history_2x="", history_4x=""), "has_clean_x_embedder"),
        },
        sizes={"images": 729, "history": 16},
    ),
    "HunyuanVideoTransformer3DModel": _VIDEO,
    "Ideogram4Transformer2DModel": ExampleInputs(
        {
            "hidden_states": "float batch text+tokens in_channels",
            "timestep": "time batch",
            "encoder_hidden_states": "float batch text+tokens llm_features_dim",
            "position_ids": "below 50 batch text+tokens 3",
            "segment_ids": "stack batch runs 1 text+tokens",
            "indicator": "stack batch runs 3 text 2 tokens",  # the class's numbers for text and for images
        },
        patch=2,
    ),
    "JoyImageEditPlusTransformer3DModel": ExampleInputs(
        {
            "hidden_states": "float batch tokens in_channels 1 patch_size[1] patch_size[2]",
            **_text("text_dim", timestep="time batch", encoder_hidden_states_mask="int_mask batch text"),
            "shape_list": "list batch list 1 shape times rows columns",
        }
    ),
    "JoyImageEditTransformer3DModel": ExampleInputs({**_CLIP, **_text("text_dim", timestep="time batch")}),
    "Kandinsky5Transformer3DModel": ExampleInputs(
        {
            **_KANDINSKY,
            "visual_rope_pos": ("range frames", "range rows", "range columns"),
            "text_rope_pos": "range text",
        }
    ),
    "Kandinsky6SRTransformer3DModel": ExampleInputs(
        {"hidden_states": "float batch frames height width 2*in_visual_dim+1", "timestep": "step batch"}
    ),
    "Kandinsky6Transformer3DModel": ExampleInputs(
        {**_KANDINSKY, "timestep": "step batch", "audio_hidden_states": "float batch audio in_audio_dim", **_MASK}
    ),
    "Krea2Transformer2DModel": ExampleInputs(
        {
            **_LATENTS,
            "encoder_hidden_states": "float batch text num_text_layers text_hidden_dim",
            "timestep": "time batch",
            "position_ids": "float text+tokens 3",
            **_MASK,
        },
        patch=2,
    ),
    "LTX2VideoTransformer3DModel": ExampleInputs(
        {
            **_LATENTS,
            "audio_hidden_states": "float batch audio audio_in_channels",
            **_text("caption_channels", timestep="step batch", **_MASK),
            "audio_encoder_hidden_states": "float batch text caption_channels",
            "audio_encoder_attention_mask": "mask batch text",
            **_GRID,
            "audio_num_frames": "number audio",
            "fps": 24.0,
        },
        space=32,
        time=8,
    ),
    "LTXVideoTransformer3DModel": ExampleInputs(
        {**_LATENTS, **_text("caption_channels", timestep="step batch", **_MASK), **_GRID}, space=32, time=8
    ),
    "LatteTransformer3DModel": ExampleInputs({**_CLIP, **_text("caption_channels")}),
    "LongCatAudioDiTTransformer": ExampleInputs(
        {
            "hidden_states": "float batch audio latent_dim",
            **_text("dit_text_dim", timestep="time batch", attention_mask="mask batch audio", **_MASK),
            "latent_cond": "float batch audio latent_dim",
        },
        {"latent_cond": "use_latent_condition"},
    ),
    "LongCatImageTransformer2DModel": ExampleInputs({**_PACKED, **_IDS}, patch=2),
    "Lumina2Transformer2DModel": ExampleInputs({**_PICTURE, **_text("cap_feat_dim", timestep="time batch", **_MASK)}),
    "LuminaNextDiT2DModel": ExampleInputs(
        {
            **_PICTURE,
            **_text("cross_attention_dim", timestep="step batch", encoder_mask="int_mask batch text"),
            "image_rotary_emb": "turns side side hidden_size//num_attention_heads//2",
            "cross_attention_kwargs": {},
        },
        sizes={"side": 384},
    ),
    "MiniMaxH3Transformer3DModel": ExampleInputs(
        {
            "hidden_states": "float batch tokens in_channels*patch_size[1]*patch_size[2]",
            "audio_hidden_states": "float batch audio audio_in_channels",
            **_text("text_dim", timestep="time 1"),
            "timestep_indices": "runs 0 text+tokens+audio",
            "token_tags": "runs 1 text 0 tokens 2 audio",  # the class's numbers for text, video and audio
            "position_ids": "float text+tokens+audio 3",
            "text_indices": "range text",
            "video_indices": "range text text+tokens",
            "audio_indices": "range text+tokens text+tokens+audio",
        },
        space=16,
    ),
    "MiniMaxMusic3Transformer1DModel": ExampleInputs(
        {**_SOUND, "encoder_hidden_states": "float batch audio condition_dim"}
    ),
    "MochiTransformer3DModel": ExampleInputs({**_CLIP, **_text("text_embed_dim", **_MASK)}, time=6),
    "MotifVideoTransformer3DModel": ExampleInputs({**_CLIP, **_text("text_embed_dim", **_MASK)}),
    "NucleusMoEImageTransformer2DModel": ExampleInputs(
        {
            **_PACKED,
            "encoder_hidden_states_mask": "int_mask batch text",
            "img_shapes": "list batch shape 1 rows columns",
        },
        patch=2,
    ),
    "OmniGenTransformer2DModel": ExampleInputs(
        {
            **_PICTURE,
            "timestep": "time batch",
            "input_ids": "below vocab_size batch text",
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": "ones batch text+1+tokens text+1+tokens",
            "position_ids": "stack batch range text+1+tokens",
        }
    ),
    "OvisImageTransformer2DModel": ExampleInputs({**_PACKED, **_IDS}, patch=2),
    "PRXTransformer2DModel": ExampleInputs({**_PICTURE, **_text("context_in_dim", timestep="time batch")}),
    "PixArtTransformer2DModel": ExampleInputs(
        {
            **_PICTURE,
            **_text("(caption_channels)or(cross_attention_dim)", timestep="step batch", **_INT_MASK),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }
    ),
    "QwenImage21Transformer2DModel": ExampleInputs(
        {
            **_LATENTS,
            **_text("context_in_dim", timestep="time batch"),
            "img_shapes": "list batch list 1 shape 1 rows columns",
            "img_mask": "stack batch runs False text True tokens//4",
        },
        space=16,
        patch=1,
    ),
    "QwenImageTransformer2DModel": ExampleInputs(
        {**_PACKED, **_SCALE, "img_shapes": "list batch list 1 shape 1 rows columns"}, _GUIDED, patch=2
    ),
    "SD3Transformer2DModel": ExampleInputs(
        {**_PICTURE, **_text("joint_attention_dim", timestep="step batch"), **_POOLED}
    ),
    "SanaTransformer2DModel": ExampleInputs(
        {**_PICTURE, **_text("caption_channels", timestep="step batch", **_INT_MASK), **_SCALE}, _GUIDED, space=32
    ),
    "SanaVideoTransformer3DModel": ExampleInputs({**_CLIP, **_text("caption_channels", **_INT_MASK)}),
    "SanaWMLTX2RefinerTransformer3DModel": ExampleInputs(
        {
            **_LATENTS,
            **_text("caption_channels", timestep="step batch tokens", **_INT_MASK),
            "video_rotary_emb": ("float batch tokens num_attention_heads*attention_head_dim",) * 2,
        },
        space=32,
        time=8,
    ),
    "SkyReelsV2Transformer3DModel": _wan(),
    "StableAudio3DiTModel": ExampleInputs(
        {
            "hidden_states": "float batch io_channels audio",
            **_text("cond_token_dim", timestep="time batch", **_MASK),
            "global_hidden_states": "float batch global_cond_dim",
        }
    ),
    "StableAudioDiTModel": ExampleInputs(
        {
            **_SOUND,
            **_text("cross_attention_input_dim"),
            "global_hidden_states": "float batch 1 global_states_input_dim",
            "rotary_embedding": ("float audio+1 attention_head_dim//2",) * 2,
        }
    ),
    "WanAnimateTransformer3DModel": ExampleInputs(
        {
            **_CLIP,
            "hidden_states": "float batch in_channels frames+1 height width",  # a reference before the frames
            **_text("text_dim"),
            **_IMAGE,
            "pose_hidden_states": "float batch latent_channels frames height width",
            "face_pixel_values": "float batch 3 4*frames-3 motion_encoder_size motion_encoder_size",
        },
        sizes=_IMAGES,
    ),
    "WanTransformer3DModel": _wan(),
    "WanVACETransformer3DModel": _wan(control_hidden_states="float batch vace_in_channels frames height width"),
    "ZImageTransformer2DModel": ExampleInputs(
        {
            "x": "list batch float in_channels 1 height width",
            "t": "time batch",
            "cap_feats": "list batch float text cap_feat_dim",
        },
        patch=2,
    ),
}
