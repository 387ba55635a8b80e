"""Pipelines of videos and of sound."""

# fmt: off
from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import numpy as np
import torch
import transformers

from tests.pipelines import text, vaes
from tests.pipelines.tiny import (
    WORDS,
    WORDS_2,
    TinyPipe,
    flow_match,
    image,
    model,
    no_zeros,
    of,
    parts_of,
    prompt_embeds,
    unipc,
    video,
)

_TEXT = {"prompt": "A cat runs.", "negative_prompt": "A slow dog, blurred."}
_SIZE = {"height": 48, "width": 80}  # 15 tokens of each latent frame
_LARGE = {"height": 96, "width": 160}  # the same for autoencoders that make images 32 times smaller
_IMAGE = {"image": image(48, 80)}


def _call(scale: float, frames: int = 9, /, **others: Any) -> dict[str, Any]:
    """Three latent frames, if one is made of four."""
    steps = {"num_frames": frames, "num_inference_steps": 2, "guidance_scale": scale, "output_type": "latent"}
    return {**_TEXT, **_SIZE, **steps, **others}


def _short(scale: float, frames: int = 9, /, **others: Any) -> dict[str, Any]:
    return _call(scale, frames, max_sequence_length=24, **others)


def _differing(encoder: Any) -> Any:
    """A tokenizer and an encoder whose words differ much."""
    tokenizer, model = encoder()
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    return tokenizer, model


# Wan and models of its form

_WAN = TinyPipe(
    "WanPipeline", parts_of(text.umt5, model("wan"), vaes.wan, flow_match(shift=7.0)), _short(4.0), "calls",
    output="frames",
)
_NO_TEXT = {"prompt": ..., "negative_prompt": ..., "max_sequence_length": ...}
_EMBEDS = {**_NO_TEXT, **prompt_embeds(9, 20, 24)}
_LONG_EMBEDS = {**_NO_TEXT, **prompt_embeds(300, 500, 512)}  # 512 tokens for text, and the others for the image
_WITH_IMAGE = {"image_dim": 16, "added_kv_proj_dim": 48}


def _vision(kind: str, **config: Any) -> Any:
    """A function that makes an encoder of images, which have 8 x 8 pixels and 4 tokens, CLIP one more."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config_of = getattr(transformers, f"{kind}VisionConfig")
    return lambda: getattr(transformers, f"{kind}VisionModel")(config_of(**sizes, **config)).eval()


_CLIP = {
    "image_encoder": _vision("CLIP", num_hidden_layers=2),
    "image_processor": lambda: transformers.CLIPImageProcessor(
        size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}
    ),
}
_SIGLIP_IMAGES = {"feature_extractor": lambda: transformers.SiglipImageProcessor(size={"height": 8, "width": 8})}
_SIGLIP = {"image_encoder": _vision("Siglip", num_hidden_layers=1), **_SIGLIP_IMAGES}
_TWO = {
    "transformer_2": model("wan"), "scheduler": unipc, "boundary_ratio": lambda: 0.875,
}
_TOKEN_TIMES = {"scheduler": unipc, "expand_timesteps": lambda: True}
_IMAGE_TO_VIDEO = _WAN.but(
    "WanImageToVideoPipeline", {"transformer": model("wan", in_channels=12, **_WITH_IMAGE), **_CLIP},
    {**_LONG_EMBEDS, **_IMAGE},
)
_IMAGE_EMBEDS = {**_EMBEDS, **_IMAGE}
_ANIMATE = TinyPipe(  # two segments of a reference and three latent frames, the second after the last of the first
    "WanAnimatePipeline",
    {**_WAN.parts, **_CLIP, "transformer": model("wan_animate_image", motion_encoder_batch_size=8), "scheduler": unipc},
    {
        **_call(4.0), **_IMAGE, "num_frames": ..., "segment_frame_length": 9, **_LONG_EMBEDS,
        "pose_video": video(17, 48, 80, seed=2), "face_video": video(17, 8, 8, seed=3),
    },
    "calls", output="frames",
)
_SKYREELS = _WAN.but("SkyReelsV2Pipeline", {"transformer": model("skyreels"), "scheduler": unipc}, _EMBEDS)
_FORCING = _SKYREELS.but(
    "SkyReelsV2DiffusionForcingPipeline", {"transformer": model("skyreels", inject_sample_info=True)}, {"prompt": None}
)
_CHRONOEDIT = _WAN.but(  # two latent frames
    "ChronoEditPipeline",
    {**_CLIP, "transformer": model("chronoedit_per_token_timestep", in_channels=12), "scheduler": unipc},
    {**_LONG_EMBEDS, **_IMAGE, "num_frames": ...},
)
_HELIOS = _WAN.but(  # two chunks of three latent frames; the second has the first as its history
    "HeliosPipeline",
    {
        "transformer": model("helios"),
        "scheduler": of("HeliosScheduler", stages=1, stage_range=[0, 1], use_dynamic_shifting=True),
    },
    {**_EMBEDS, "num_frames": 18, "num_latent_frames_per_chunk": 3, "history_sizes": [4, 2, 1]},
)
# Each chunk is denoised with 6, then 24, then 96 tokens. With the default gamma, 1 / 3, the covariance of a block of
# noise is singular, so its Cholesky factor may not exist.
_PYRAMID = _HELIOS.but(
    "HeliosPyramidPipeline", {"scheduler": of("HeliosScheduler", use_dynamic_shifting=True, gamma=0.3)},
    {"height": 64, "width": 128, "pyramid_num_inference_steps_list": [2, 2, 2], "num_inference_steps": ...},
)
_ANYFLOW = _WAN.but(
    "AnyFlowPipeline",
    {"transformer": model("anyflow"), "scheduler": of("FlowMapEulerDiscreteScheduler", shift=5.0)}, guidance="batch",
)
_WANS = {
    "wan": _WAN,
    "wan_two_experts": _WAN.but(parts=_TWO, transformers=("transformer", "transformer_2")),
    "wan_per_token_timestep": _WAN.but(parts=_TOKEN_TIMES),
    "wan_image_to_video": _IMAGE_TO_VIDEO,
    "wan_image_to_video_two_experts": _WAN.but(
        "WanImageToVideoPipeline",
        {**_TWO, "transformer": model("wan", in_channels=12), "transformer_2": model("wan", in_channels=12)},
        {**_IMAGE_EMBEDS, "guidance_scale_2": 3.0}, transformers=("transformer", "transformer_2"),
    ),
    "wan_image_to_video_per_token_timestep": _WAN.but("WanImageToVideoPipeline", _TOKEN_TIMES, _IMAGE_EMBEDS),
    "wan_video_to_video": _WAN.but(  # two of four steps
        "WanVideoToVideoPipeline", {"scheduler": unipc},
        {**_EMBEDS, "num_frames": ..., "video": video(9, 48, 80), "num_inference_steps": 4, "strength": 0.5},
    ),
    "wan_vace": _WAN.but(
        "WanVACEPipeline", {"transformer": model("wan_vace", vace_in_channels=72)},
        {
            **_EMBEDS, "video": video(9, 48, 80), "mask": [frame.convert("L") for frame in video(9, 48, 80, seed=2)],
            "reference_images": [image(48, 80, seed=3)],
        },
    ),
    "wan_animate": _ANIMATE,
    "wan_animate_replace": _ANIMATE.but(
        call={
            "mode": "replace", "background_video": video(17, 48, 80, seed=5),
            "mask_video": [frame.convert("L") for frame in video(17, 48, 80, seed=4)],
        }
    ),
    "lucy_edit": _WAN.but(
        "LucyEditPipeline", {"transformer": model("wan", in_channels=8), "scheduler": unipc},
        {**_EMBEDS, "video": video(9, 48, 80)},
    ),
    "skyreels": _SKYREELS,
    "skyreels_image_to_video": _SKYREELS.but(
        "SkyReelsV2ImageToVideoPipeline", {"transformer": model("skyreels", in_channels=12, **_WITH_IMAGE), **_CLIP},
        {**_LONG_EMBEDS, **_IMAGE},
    ),
    "skyreels_forcing": _FORCING,
    "skyreels_forcing_asynchronous": _FORCING.but(  # nine latent frames of 5 tokens, three a block, each a step behind
        call={"height": 16, "num_frames": 33, "ar_step": 1, "causal_block_size": 3}
    ),
    "skyreels_forcing_long": _FORCING.but(  # five latent frames, in windows of three that overlap
        call={"num_frames": 17, "base_num_frames": 9, "overlap_history": 5}
    ),
    "skyreels_forcing_image_to_video": _FORCING.but("SkyReelsV2DiffusionForcingImageToVideoPipeline", call=_IMAGE),
    "chronoedit": _CHRONOEDIT,
    "chronoedit_reasoning": _CHRONOEDIT.but(  # three latent frames in the first step, and two in the second
        call={"num_frames": 9, "enable_temporal_reasoning": True, "num_temporal_reasoning_steps": 1}
    ),
    "helios": _HELIOS,
    "helios_image_to_video": _HELIOS.but(call=_IMAGE),
    "helios_pyramid": _PYRAMID,
    "helios_pyramid_distilled": _PYRAMID.but(
        parts={
            "scheduler": of("HeliosDMDScheduler", use_dynamic_shifting=True, gamma=0.3), "is_distilled": lambda: True,
        },
        call={"guidance_scale": 1.0}, guidance="none",
    ),
    "anyflow": _ANYFLOW,
    "anyflow_video": _ANYFLOW.but(call={"video": video(1, 48, 80)}),  # the first latent frame is that of a video
}

# HunyuanVideo, Kandinsky


_HUNYUAN = TinyPipe(  # one branch: guidance is an input of the model
    "HunyuanVideoPipeline",
    parts_of(
        text.llama, model("hunyuan_video", patch_size=2), vaes.hunyuan_video, flow_match(shift=7.0),
        **{WORDS_2: partial(text.clip, 8)},
    ),
    _call(4.5, negative_prompt=..., max_sequence_length=32, prompt_template=text.template),
    "none", output="frames",
)
_TRUE_CFG = {"negative_prompt": _TEXT["negative_prompt"], "true_cfg_scale": 3.0}
_HUNYUAN_CFG = _HUNYUAN.but(call=_TRUE_CFG, guidance="calls")


def _hunyuan_image(**config: Any) -> TinyPipe:
    return _HUNYUAN_CFG.but(
        "HunyuanVideoImageToVideoPipeline",
        {f"{WORDS} image_processor": text.llava, "transformer": model("hunyuan_video", patch_size=2, **config)},
        {"prompt_template": text.image_template, **_IMAGE},
    )


def _short_chat(pipe: Any) -> None:
    """Set a template and texts of a few tokens."""
    pipe.system_message = "Describe the video:"
    chat = [{"role": "system", "content": pipe.system_message}, {"role": "user", "content": ""}]
    ids = pipe.tokenizer.apply_chat_template(chat, add_generation_prompt=False, return_dict=True)["input_ids"]
    pipe.prompt_template_encode_start_idx = len(ids) - 2  # without the end of the message
    pipe.tokenizer_max_length = 24
    pipe.tokenizer_2_max_length = 12
    pipe.vision_num_semantic_tokens = 4


def _language_model(layers: int) -> Any:
    tokenizer, model = text.qwen25_vl(layers)
    return tokenizer, model.model.language_model


_VIDEO15 = TinyPipe(  # what is quoted is for the second text encoder
    "HunyuanVideo15Pipeline",
    parts_of(
        partial(_language_model, 3), model("hunyuan_video15", in_channels=9, image_embed_dim=16, target_size=16),
        vaes.hunyuan_video15, flow_match(shift=7.0), **{WORDS_2: partial(text.byt5, 8)},
        guider=of("ClassifierFreeGuidance", guidance_scale=4.0),
    ),
    {
        "prompt": 'A cat says "hi".', "negative_prompt": _TEXT["negative_prompt"], "height": 12, "width": 20,
        "num_frames": 5, "num_inference_steps": 2, "output_type": "latent",
    },
    "calls", output="frames", prepare=_short_chat,
)


def _short_template(pipe: Any) -> None:
    """Set a template of a few tokens."""
    start = "<|im_start|>system\nDescribe the video:<|im_end|>\n<|im_start|>user\n"
    pipe.prompt_template = start + "{}<|im_end|>"
    pipe.prompt_template_encode_start_idx = len(pipe.tokenizer.tokenizer(start).input_ids)


_KANDINSKY = TinyPipe(
    "Kandinsky5T2VPipeline",
    {
        "- text_encoder tokenizer": lambda: text.with_processor(text.qwen25_vl(), text.qwen2_processor),
        WORDS_2: partial(text.clip, 8), "transformer": model("kandinsky5"), "vae": vaes.hunyuan_video,
        "scheduler": flow_match(shift=5.0),
    },
    _call(4.0, max_sequence_length=32), "calls", output="frames", prepare=_short_template,
)
_KANDINSKY6 = _KANDINSKY.but(  # also 17 tokens of audio, and a long text: its template cannot be changed
    "Kandinsky6TI2VAPipeline",
    {
        "transformer": model("kandinsky6", visual_cond=True, visual_token_type_num_embeddings=2),
        "audio_vae": vaes.mmaudio, "vocoder": vaes.mmaudio_vocoder,
    },
    {"max_sequence_length": 300}, prepare=None,
)
_HUNYUANS = {
    "hunyuan_video": _HUNYUAN,
    "hunyuan_video_true_cfg": _HUNYUAN_CFG,
    "hunyuan_video_image_to_video": _hunyuan_image(
        image_condition_type="latent_concat", in_channels=9, guidance_embeds=False
    ),
    "hunyuan_video_token_replace": _hunyuan_image(
        image_condition_type="token_replace", num_layers=2, num_single_layers=2
    ),
    "hunyuan_skyreels_image_to_video": _HUNYUAN_CFG.but(
        "HunyuanSkyreelsImageToVideoPipeline", {"transformer": model("hunyuan_video", in_channels=8, patch_size=2)},
        _IMAGE,
    ),
    # Two sections, the second with the first as its history. The result is a list: the latents after each section.
    "framepack": _HUNYUAN_CFG.but(
        "HunyuanVideoFramepackPipeline", {"transformer": model("framepack"), **_SIGLIP},
        {**_IMAGE, "num_frames": 13, "latent_window_size": 3},
    ),
    "hunyuan_video15": _VIDEO15,
    "hunyuan_video15_image_to_video": _VIDEO15.but(  # it chooses height and width by the image
        "HunyuanVideo15ImageToVideoPipeline", _SIGLIP, {"image": image(12, 20), "height": ..., "width": ...}
    ),
    "kandinsky5": _KANDINSKY,
    "kandinsky5_image_to_video": _KANDINSKY.but(  # its normalization of the first four latent frames needs one more
        "Kandinsky5I2VPipeline", {"transformer": model("kandinsky5", visual_cond=True)}, {**_IMAGE, "num_frames": 17}
    ),
    "kandinsky6": _KANDINSKY6,
    "kandinsky6_audio": _KANDINSKY6.but(output="audio"),
    "kandinsky6_image": _KANDINSKY6.but(call=_IMAGE),  # a frame more
}

# the other models of videos


class Unguarded(diffusers.ModelMixin, diffusers.ConfigMixin):
    """Replacement for the checker of unsafe content, which is required but large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.zeros(1), persistent=False)

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray:
        return frames


_COG_SIZES: dict[str, Any] = {
    "attention_head_dim": 16, "time_embed_dim": 8, "text_embed_dim": 16, "sample_frames": 9, "max_text_seq_length": 24,
}
_COG_1_5: dict[str, Any] = {**_COG_SIZES, "patch_size_t": 2, "patch_bias": False}
_COGVIDEOX = TinyPipe(
    "CogVideoXPipeline",
    parts_of(text.t5, model("cogvideox", **_COG_SIZES), vaes.cogvideox, of("CogVideoXDDIMScheduler")), _short(6.0),
    "batch", output="frames",
)
_COSMOS = TinyPipe(
    "CosmosTextToWorldPipeline",
    parts_of(
        text.t5, model("cosmos"), vaes.cosmos,
        of(
            "EDMEulerScheduler", sigma_max=80, sigma_schedule="karras", prediction_type="epsilon",
            final_sigmas_type="sigma_min",
        ),
        safety_checker=Unguarded,
    ),
    _short(3.0), "calls", output="frames",
)
_COSMOS2 = {"vae": vaes.wan, "scheduler": flow_match(use_karras_sigmas=True)}
_PREDICT = _COSMOS.but(  # its text embeddings are the outputs of all layers, side by side
    "Cosmos2_5_PredictBasePipeline",
    {
        WORDS: text.qwen25_vl, "vae": vaes.wan, "scheduler": unipc,
        "transformer": model(
            "cosmos", extra_pos_embed_type=None, in_channels=5, text_embed_dim=32, use_crossattn_projection=True,
            crossattn_proj_in_channels=32, encoder_hidden_states_channels=32,
        ),
    },
    {"max_sequence_length": 80},
)
_COSMOS3 = TinyPipe(  # a text of a few tokens that is another length without the prompt comes first
    "Cosmos3OmniPipeline",
    {
        "text_tokenizer": text.qwen_tokenizer, "vae": vaes.wan, "scheduler": unipc,
        "transformer": lambda: model(
            "cosmos3", latent_channel=4, patch_latent_dim=16, vocab_size=len(text.qwen_tokenizer())
        )(),
        "enable_safety_checker": lambda: False,
    },
    _call(5.0, use_system_prompt=False, add_resolution_template=False, add_duration_template=False), "calls",
    output="video",
)
_LTX = TinyPipe(
    "LTXPipeline", parts_of(text.t5, model("ltx"), vaes.ltx), _short(3.0, 17, **_LARGE), "batch", output="frames"
)
_LARGE_IMAGE = image(96, 160)


def _conditions() -> list[Any]:
    """A first frame, and a later one as tokens of its own: 60 tokens."""
    from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

    later = LTXVideoCondition(video=video(1, 96, 160, seed=2), frame_index=8, strength=0.8)
    return [LTXVideoCondition(image=_LARGE_IMAGE, frame_index=0), later]


def _connectors(**config: Any) -> Any:
    """A function that makes LTX-2's connectors: the text is a hidden state of each of two layers, and that before."""
    sides = {
        f"{side}_connector_{name}": value
        for side in ("video", "audio")
        for name, value in {
            "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None,
        }.items()
    }
    sizes = {"caption_channels": 16, "text_proj_in_factor": 3, "connector_rope_base_seq_len": 32}

    def make() -> Any:
        from diffusers.pipelines.ltx2 import LTX2TextConnectors

        return no_zeros(LTX2TextConnectors(**{**sizes, **sides, **config}).eval())

    return make


def _ltx2_guidance(stg: float, modality: float, rescale: float) -> dict[str, float]:
    both = {"stg_scale": stg, "modality_scale": modality, "guidance_rescale": rescale}
    return {f"{side}{name}": value for side in ("", "audio_") for name, value in both.items()}


_LTX2 = TinyPipe(  # three latent frames of 15 tokens, and 17 tokens of audio
    "LTX2Pipeline",
    parts_of(
        text.gemma3, model("ltx2"), vaes.ltx2, audio_vae=vaes.ltx2_audio, vocoder=vaes.ltx2_vocoder,
        connectors=_connectors(),
    ),
    _short(
        3.0, 17, **_LARGE, frame_rate=25.0, audio_guidance_scale=5.0, **_ltx2_guidance(0.0, 1.0, 0.0),
        spatio_temporal_guidance_blocks=None, use_cross_timestep=False,
    ),
    "batch", output="frames",
)
_CFG = of("ClassifierFreeGuidance", guidance_scale=5.0)
_MOTIF = TinyPipe(
    "MotifVideoPipeline",
    parts_of(
        text.t5_gemma2, model("motif_video", in_channels=9, patch_size=2), vaes.wan, flow_match(shift=7.0), guider=_CFG
    ),
    {name: x for name, x in _short(0.0).items() if name != "guidance_scale"}, "calls", output="frames",
)
_SANA = TinyPipe(  # five latent frames
    "SanaVideoPipeline",
    parts_of(
        partial(_differing, partial(text.gemma2, 8)), model("sana_video", patch_size=(1, 4, 4)), vaes.wan, unipc
    ),
    _short(
        6.0, num_frames=..., frames=17, **_LARGE, complex_human_instruction=["Enhance:"], use_resolution_binning=False
    ),
    "batch", output="frames",
)


def _minimax_h3(**parts: Any) -> Any:
    """A modular pipeline; its processor is another one of transformers, without videos, which need torchvision."""
    from lightning_cp.finetune.modular import called_like_others

    tokenizer, encoder = text.qwen3_vl(8, 51, 1)  # the text is read after layer 50, which must not be the last one
    pipe = diffusers.MiniMaxH3ModularPipeline()
    pipe.update_components(
        tokenizer=tokenizer, text_encoder=encoder,
        processor=transformers.LlavaProcessor(
            transformers.Qwen2VLImageProcessorPil(), tokenizer, image_token="<|image_pad|>"
        ),
        **parts,
    )
    pipe.set_progress_bar_config(disable=True)
    return called_like_others(pipe)


_OTHERS = {
    "allegro": TinyPipe(
        "AllegroPipeline", parts_of(partial(text.t5, 8), model("allegro"), vaes.allegro, of("DDIMScheduler")),
        _short(6.0, 12, clean_caption=False), "batch", output="frames",
    ),
    "cogvideox": _COGVIDEOX,
    "cogvideox_sincos": _COGVIDEOX.but(
        parts={"transformer": model("cogvideox", **_COG_SIZES, use_rotary_positional_embeddings=False)}
    ),
    "cogvideox_1_5": _COGVIDEOX.but(
        parts={"transformer": model("cogvideox", **_COG_1_5), "scheduler": of("CogVideoXDPMScheduler")}
    ),
    "cogvideox_image_to_video": _COGVIDEOX.but(
        "CogVideoXImageToVideoPipeline",
        {"transformer": model("cogvideox", **_COG_SIZES, in_channels=8, use_learned_positional_embeddings=True)},
        _IMAGE,
    ),
    "cogvideox_image_to_video_1_5": _COGVIDEOX.but(
        "CogVideoXImageToVideoPipeline",
        {"transformer": model("cogvideox", **_COG_1_5, in_channels=8, ofs_embed_dim=8)}, _IMAGE,
    ),
    "cogvideox_video_to_video": _COGVIDEOX.but(  # two of four steps
        "CogVideoXVideoToVideoPipeline",
        call={"video": video(9, 48, 80), "num_inference_steps": 4, "strength": 0.5, "num_frames": ...},
    ),
    "cosmos": _COSMOS,
    "cosmos_video_to_world": _COSMOS.but(
        "CosmosVideoToWorldPipeline", {"transformer": model("cosmos", in_channels=5)}, {"video": video(3, 48, 80)}
    ),
    "cosmos2_text_to_image": _COSMOS.but(
        "Cosmos2TextToImagePipeline", {**_COSMOS2, "transformer": model("cosmos", extra_pos_embed_type=None)},
        {"num_frames": ...}, output="images",
    ),
    "cosmos2_video_to_world": _COSMOS.but(
        "Cosmos2VideoToWorldPipeline",
        {**_COSMOS2, "transformer": model("cosmos", extra_pos_embed_type=None, in_channels=5)}, _IMAGE,
    ),
    "cosmos2_5_predict": _PREDICT,
    "cosmos2_5_predict_video": _PREDICT.but(call={"video": video(9, 48, 80)}),  # five frames are two latent frames
    "cosmos3": _COSMOS3,
    "cosmos3_image_to_video": _COSMOS3.but(call=_IMAGE),
    "easyanimate": TinyPipe(
        "EasyAnimatePipeline",
        parts_of(partial(_differing, partial(text.qwen25_vl, 3)), model("easyanimate"), vaes.magvit), _call(6.0),
        "batch", output="frames",
    ),
    "latte": TinyPipe(
        "LattePipeline", parts_of(partial(text.t5, 8), model("latte"), vaes.kl, of("DDIMScheduler")),
        _call(5.0, num_frames=..., video_length=3, clean_caption=False), "batch", output="frames",
    ),
    "ltx": _LTX.but(parts={"scheduler": flow_match(use_dynamic_shifting=True, shift_terminal=0.1)}),
    "ltx_image_to_video": _LTX.but("LTXImageToVideoPipeline", call={"image": _LARGE_IMAGE}),
    "ltx_condition": _LTX.but(  # its own schedule of steps is a tensor, for which NumPy warns
        "LTXConditionPipeline", call={"conditions": _conditions, "timesteps": [1000.0, 500.0]}
    ),
    "ltx_long": _LTX.but(  # two windows that overlap: the second one has a timestep for each token, [b, s, 1]
        "LTXI2VLongMultiPromptPipeline", {"scheduler": of("LTXEulerAncestralRFScheduler")},
        {
            "prompt": "A cat runs. | A dog sleeps.", "cond_image": _LARGE_IMAGE, "temporal_tile_size": 16,
            "temporal_overlap": 8,
        },
    ),
    "ltx2": _LTX2,
    "ltx2_audio": _LTX2.but(output="audio"),
    # LTX-2.3: a projection of text for each modality. Two more branches: without the attention of a block, and without
    # the other modality.
    "ltx2_guided": _LTX2.but(
        parts={
            "transformer": model("ltx2_newer", use_keyframes_abs_pos_embedding=False),
            "connectors": _connectors(
                video_connector_attention_head_dim=16, video_connector_num_learnable_registers=8,
                audio_connector_num_learnable_registers=8, per_modality_projections=True, video_hidden_dim=32,
                audio_hidden_dim=16,
            ),
        },
        call={
            **_ltx2_guidance(1.0, 3.0, 0.7), "spatio_temporal_guidance_blocks": [1], "use_cross_timestep": True,
        },
    ),
    "ltx2_image_to_video": _LTX2.but("LTX2ImageToVideoPipeline", call={"image": _LARGE_IMAGE, "image_crf": 0}),
    # The shortest clip that the pipeline takes: 37 latent frames of 2 tokens, and 414 tokens of sound.
    "minimax_h3": TinyPipe(
        _minimax_h3,
        {
            "transformer": model("minimax_h3"), "vae": lambda: no_zeros(vaes.minimax_h3()),
            "audio_vae": lambda: no_zeros(vaes.minimax_h3_audio()), "scheduler": of("MiniMaxH3Scheduler", shift=12.0),
            "audio_scheduler": of("MiniMaxH3Scheduler", shift=3.0),
        },
        {
            "prompt": "A cat runs.", "height": 16, "width": 32, "num_frames": 124, "num_inference_steps": 3,
            "output_type": "pt",
        },
        "none", output="frames",
    ),
    "mochi": TinyPipe(
        "MochiPipeline",
        parts_of(
            text.t5, model("mochi", in_channels=12, max_sequence_length=24), vaes.mochi,
            flow_match(invert_sigmas=True),
        ),
        _short(4.5, 13), "batch", output="frames",
    ),
    "motif_video": _MOTIF,
    "motif_video_projected": _MOTIF.but(
        parts={
            "guider": of(
                "AdaptiveProjectedGuidance", guidance_scale=5.0, adaptive_projected_guidance_momentum=-0.5,
                adaptive_projected_guidance_rescale=2.0, eta=0.0,
            )
        }
    ),
    "motif_video_image_to_video": _MOTIF.but("MotifVideoImage2VideoPipeline", _SIGLIP_IMAGES, _IMAGE),
    "sana_video": _SANA,
    "sana_video_image_to_video": _SANA.but(
        "SanaImageToVideoPipeline", {"scheduler": flow_match(shift=8.0)}, {"image": _LARGE_IMAGE}
    ),
}

# sound: 17 or 18 tokens

_SOUND = {**_TEXT, "num_inference_steps": 2, "output_type": "latent"}
_UNSHIFTED = flow_match(num_train_timesteps=1, shift=1.0)


def _condition_encoder() -> Any:
    from diffusers.pipelines.ace_step import AceStepConditionEncoder

    return no_zeros(
        AceStepConditionEncoder(
            hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            sliding_window=5, text_hidden_dim=32, timbre_hidden_dim=4, num_lyric_encoder_hidden_layers=2,
            num_timbre_encoder_hidden_layers=2,
        ).eval()
    )


def _projection() -> Any:
    from diffusers.pipelines.stable_audio import StableAudioProjectionModel

    sizes = {"text_encoder_dim": 16, "conditioning_dim": 16, "min_value": 0, "max_value": 32}
    return StableAudioProjectionModel(**sizes).eval()


def _duration() -> Any:
    from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder

    return StableAudio3DurationEmbedder(output_dim=16, fourier_dim=16).eval()


_AUDIO = {
    "ace_step": TinyPipe(  # the branch without a prompt has the model's own condition
        "AceStepPipeline",
        parts_of(
            partial(_differing, partial(text.qwen3, 32)), model("ace_step", encoder_hidden_size=None),
            partial(vaes.oobleck, 100), _UNSHIFTED, condition_encoder=_condition_encoder,
        ),
        {
            "prompt": "A cat sings.", "lyrics": "Soft notes", "audio_duration": 0.66, "num_inference_steps": 2,
            "guidance_scale": 6.0, "max_lyric_length": 64, "output_type": "latent",
        },
        "batch", output="audios",
    ),
    "longcat_audio": TinyPipe(
        "LongCatAudioDiTPipeline",
        {WORDS: text.umt5, "transformer": model("longcat_audio"), "vae": vaes.longcat},
        {**_SOUND, "audio_duration_s": 0.35, "guidance_scale": 4.0}, "calls", output="audios",
    ),
    "stable_audio": TinyPipe(
        "StableAudioPipeline",
        parts_of(
            partial(text.t5, length=24), model("stable_audio", global_states_input_dim=32, sample_size=18),
            vaes.oobleck, of("EDMDPMSolverMultistepScheduler", prediction_type="v_prediction", sigma_data=1.0),
            projection_model=_projection,
        ),
        {**_SOUND, "audio_end_in_s": 8.0, "guidance_scale": 6.0}, "batch", output="audios",
    ),
    "stable_audio3": TinyPipe(
        "StableAudio3Pipeline",
        parts_of(
            text.t5_gemma_model, model("stable_audio3", global_cond_dim=16), vaes.same, _UNSHIFTED,
            duration_embedder=_duration,
        ),
        {**_SOUND, "duration": 4.25, "guidance_scale": 6.0}, "batch", output="audios",
    ),
}
TINY = {**_WANS, **_HUNYUANS, **_OTHERS, **_AUDIO}
