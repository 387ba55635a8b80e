"""MiniMax-H3, a modular pipeline."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3ModularPipeline,
    MiniMaxH3Scheduler,
)
from transformers import LlavaProcessor, Qwen2VLImageProcessorPil

from lightning_cp.finetune.modular import called_like_others
from tests.models import TINY as MODELS
from tests.pipelines.common import quiet
from tests.pipelines.text.qwen import qwen3_vl
from tests.pipelines.tiny import TinyPipe, no_zeros

_LAYERS = 51  # the pipeline reads the text after the 50th layer, which must not be the last one


def _vae() -> AutoencoderKLMiniMaxH3:
    """Pictures 8 times smaller, and 5 latent frames of 17."""
    vae = AutoencoderKLMiniMaxH3(
        latent_channels=4,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 2),
        temporal_downsample_factors=(1, 2, 2),
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=8,
        latents_mean=(0.1, -0.2, 0.3, 0.0),
        latents_std=(0.5, 1.5, 0.8, 1.2),
    )
    return no_zeros(vae.eval())


def _audio_vae() -> AutoencoderKLMiniMaxH3Audio:
    """40 latents a second, as the pipeline expects, of 8,000 samples."""
    with quiet():
        vae = AutoencoderKLMiniMaxH3Audio(
            encoder_dim=2,
            encoder_rates=(5, 5, 8),
            latent_dim=12,
            latent_channels=6,
            num_attention_heads=2,
            decoder_dim=8,
            decoder_rates=(5, 5, 8),
            decoder_kernel_sizes=(9, 9, 16),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3),),
            sampling_rate=8000,
            latents_mean=[0.1, 0.0, -0.1, 0.2, 0.0, -0.3],
            latents_std=[0.7, 1.1, 0.9, 1.3, 0.6, 1.0],
        )
    return no_zeros(vae.eval())


def _h3() -> Any:
    """The processor is another one of transformers, without videos, which need torchvision."""
    tokenizer, text_encoder = qwen3_vl(hidden=8, layers=_LAYERS, heads=1)
    pipe = MiniMaxH3ModularPipeline()
    pipe.update_components(
        transformer=no_zeros(MODELS["minimax_h3"].make().eval()),
        vae=_vae(),
        audio_vae=_audio_vae(),
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        processor=LlavaProcessor(Qwen2VLImageProcessorPil(), tokenizer, image_token="<|image_pad|>"),
    )
    pipe.set_progress_bar_config(disable=True)
    return called_like_others(pipe)


def _inputs() -> dict[str, Any]:
    """The shortest clip that the pipeline takes: 37 latent frames of 2 tokens, and 414 tokens of sound."""
    size = {"height": 16, "width": 32, "num_frames": 124}
    return {"prompt": "A cat runs.", **size, "num_inference_steps": 3, "output_type": "pt"}


TINY = {"minimax_h3": TinyPipe(_h3, _inputs, "none", output="frames")}
