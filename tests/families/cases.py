"""Tiny pipelines of every family and variant, and the media and captions of their proofs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_cp.families import Media
from tests.pipelines import PIPES, vaes
from tests.pipelines.text import read_template
from tests.pipelines.tiny import loud, no_zeros, quiet

CAPTIONS = ("a cat", "two green birds fly over the high mountains")
QUOTING = ('a cat "hi"', "two green birds fly")
PICTURE, VIDEO = (1, 16, 24), (5, 32, 48)


@dataclass(frozen=True)
class Case:
    """A pipeline that the proofs are run on.

    Args:
        pipe: name of a pipeline of `tests.pipelines`.
        size: frames, height and width of the pixels.
        reference: height and width of a reference picture, or frames, height and width of a reference clip.
        scheduler: returns a scheduler in place of the pipeline's.
        vae: returns a VAE in place of the pipeline's.
        config: changes of the transformer's config.
        fps: frame rate of the clips, if it is given.
        sound: number of samples of the clips' sound; 0: none.
        change: changes other components of the pipeline.
        captions: at least two, of different lengths.
    """

    pipe: str
    size: tuple[int, int, int]
    reference: tuple[int, ...] | None = None
    scheduler: Callable[[], Any] | None = None
    vae: Callable[[], Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    fps: float | None = None
    sound: int = 0
    change: Callable[[Any], None] | None = None
    captions: tuple[str, ...] = CAPTIONS


def _published() -> Any:
    """Return the scheduler of CogVideoX with the settings of the published weights."""
    from diffusers import CogVideoXDDIMScheduler

    return CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        snr_shift_scale=1.0,
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
    )


def _euler() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=5.0)


def _dynamic_shift() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


def _decoder_with_time() -> Any:
    """LTX-Video 0.9.1 and later: the decoder takes a time."""
    return no_zeros(vaes.ltx(timestep_conditioning=True))


def _calm_vae(pipe: Any) -> None:
    """Make the matrices of the VAE smaller: with random weights it amplifies the rounding of latents to bfloat16."""
    for parameter in pipe.vae.parameters():
        parameter.data.mul_(0.7 if parameter.dim() > 1 else 1.0)


def _vae_of_ltx2(pipe: Any) -> None:
    """Set the autoencoder of Sana-Video at 720p."""
    pipe.__init__(**{**pipe.components, "vae": no_zeros(vaes.ltx2())})


def _dpm(**settings: Any) -> Callable[[], Any]:
    """Return a function that makes the multistep scheduler of Sana and PixArt."""
    from diffusers import DPMSolverMultistepScheduler

    return lambda: DPMSolverMultistepScheduler(**settings)


def _ddim() -> Any:
    from diffusers import DDIMScheduler

    return DDIMScheduler(clip_sample=False)


def _controlnet(**config: Any) -> Callable[[Any], None]:
    """Return a function that changes the config of the pipeline's ControlNet."""

    def change(pipe: Any) -> None:
        with quiet():
            controlnet = changed(pipe.controlnet, config)
        pipe.register_modules(controlnet=loud(controlnet.eval()))

    return change


def _second_expert(pipe: Any) -> None:
    """Add an expert for low noise levels, with the same weights."""
    pipe.register_modules(transformer_2=copy.deepcopy(pipe.transformer))
    pipe.register_to_config(boundary_ratio=0.875)


def _without_t5(pipe: Any) -> None:
    """Leave out the third text encoder, as users with little memory do."""
    pipe.register_modules(text_encoder_3=None, tokenizer_3=None)


def _wider_vae(pipe: Any) -> None:
    """Set a VAE that rounds pixels less in bfloat16."""
    pipe.register_modules(vae=vaes.kl(4, levels=4, width=8))


def _published_template(pipe: Any) -> None:
    """Make the template of HunyuanVideo, of which the pipeline drops 95 tokens, so long in tokens."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE as PUBLISHED

    start = str(PUBLISHED["template"]).partition("{}")[0]
    read_template(pipe.tokenizer, pipe.text_encoder, start, PUBLISHED["crop_start"])


def _published_chat(pipe: Any) -> None:
    """Set the message and the lengths of HunyuanVideo 1.5, which are not saved with a pipeline."""
    published = type(pipe)(**pipe.components)
    for name in ("system_message", "prompt_template_encode_start_idx", "tokenizer_max_length"):
        setattr(pipe, name, getattr(published, name))
    for name in ("tokenizer_2_max_length", "vision_num_semantic_tokens"):
        setattr(pipe, name, getattr(published, name))
    chat = [{"role": "system", "content": pipe.system_message}, {"role": "user", "content": "{}"}]
    start = pipe.tokenizer.apply_chat_template(chat, tokenize=False).partition("{}")[0]
    read_template(pipe.tokenizer, pipe.text_encoder, start, pipe.prompt_template_encode_start_idx)


_SANA = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}  # as published
_COG = (9, 48, 80)  # the transformers' sample size, and three latent frames: version 1.5 adds one
_LTX = (17, 64, 96)  # three latent frames of 2 x 3
CASES = {
    "flux": Case("flux", PICTURE),
    "flux_dynamic_shift": Case("flux", PICTURE, scheduler=_dynamic_shift),
    "flux_without_guidance": Case("flux_true_cfg", PICTURE),
    "flux_controlnet": Case("flux_controlnet", PICTURE, reference=(16, 24)),
    "flux_controlnet_guidance": Case(
        "flux_controlnet",
        PICTURE,
        reference=(16, 24),
        config={"guidance_embeds": True, "num_layers": 3},
        change=_controlnet(guidance_embeds=True),
    ),
    "flux_controlnet_double": Case(
        "flux_controlnet", PICTURE, reference=(16, 24), change=_controlnet(num_single_layers=0)
    ),
    "flux_kontext": Case("flux_kontext", PICTURE, reference=(24, 16)),
    "flux2": Case("flux2", (1, 32, 48)),
    "flux2_reference": Case("flux2", (1, 64, 80), reference=(80, 64)),
    "flux2_klein": Case("flux2_klein", (1, 32, 48)),
    "flux2_klein_reference": Case("flux2_klein", (1, 64, 80), reference=(64, 96)),
    "krea2": Case("krea2", (1, 24, 40)),
    "ltx": Case("ltx", _LTX, fps=24.0),
    "ltx_without_frame_rate": Case("ltx", _LTX),
    "ltx_decoder_with_time": Case("ltx", _LTX, vae=_decoder_with_time),
    "ltx_condition": Case("ltx_condition", _LTX, fps=24.0),
    "ltx_image": Case("ltx_image_to_video", _LTX, fps=24.0),
    "ltx2": Case("ltx2", _LTX, fps=25.0, sound=11_000),
    "ltx2_without_sound": Case("ltx2", _LTX),
    "ltx2_newer": Case("ltx2_guided", _LTX, fps=30.0, sound=9_000),
    "ltx2_image": Case("ltx2_image_to_video", _LTX, fps=25.0, sound=11_000),
    "minimax_h3": Case("minimax_h3", (124, 16, 32), fps=24.0, sound=40_000),
    "minimax_h3_without_sound": Case("minimax_h3", (124, 16, 32)),
    "wan": Case("wan", VIDEO),
    "wan_two_experts": Case("wan_two_experts", VIDEO),
    "wan_time_per_token": Case("wan_per_token_timestep", VIDEO),
    "wan_image": Case("wan_image_to_video", VIDEO),
    "wan_image_two_experts": Case("wan_image_to_video_two_experts", VIDEO),
    "wan_image_time_per_token": Case("wan_image_to_video_per_token_timestep", VIDEO, scheduler=_euler),
    "wan_vace": Case("wan_vace", VIDEO, reference=VIDEO),
    "wan_vace_two_experts": Case("wan_vace", VIDEO, reference=VIDEO, change=_second_expert),
    "cogvideox": Case("cogvideox", VIDEO),
    "cogvideox_sincos": Case("cogvideox_sincos", VIDEO),
    "cogvideox_v_prediction": Case("cogvideox", VIDEO, scheduler=_published),
    "cogvideox_1_5": Case("cogvideox_1_5", _COG),
    "cogvideox_image": Case("cogvideox_image_to_video", _COG),
    "cogvideox_image_1_5": Case("cogvideox_image_to_video_1_5", _COG, scheduler=_published),
    "sd3": Case("sd3", (1, 12, 20)),
    "sd3_without_t5": Case("sd3", (1, 12, 20), change=_without_t5),
    "sana": Case("sana", (1, 192, 96), scheduler=_dpm(**_SANA)),
    "sana_euler": Case("sana", (1, 192, 96), scheduler=_euler),
    "sana_video_ltx2": Case("sana_video", (25, 128, 256), scheduler=_dpm(**_SANA), change=_vae_of_ltx2),
    "sana_video": Case("sana_video", (9, 64, 96), scheduler=_euler, change=_calm_vae),
    "pixart_sigma": Case("pixart_sigma", (1, 48, 80), scheduler=_ddim, change=_wider_vae),
    "pixart_sigma_multistep": Case("pixart_sigma", (1, 48, 80), scheduler=_dpm(), change=_wider_vae),
    "hunyuan_video": Case("hunyuan_video", (9, 48, 80), change=_published_template),
    "hunyuan_video15": Case("hunyuan_video15", (5, 12, 20), change=_published_chat, captions=QUOTING),
    "hunyuan_video15_image_to_video": Case(
        "hunyuan_video15_image_to_video", (5, 12, 20), change=_published_chat, captions=QUOTING
    ),
    "qwen_image": Case("qwen_image", (1, 24, 40)),
    "qwen_image_controlnet": Case("qwen_image_controlnet", (1, 24, 40), reference=(24, 40)),
    # their autoencoder makes pictures 128 times smaller, because references are enlarged to 2048 x 512
    "qwen_image_edit": Case("qwen_image_edit", (1, 512, 768), reference=(32, 8)),
    "qwen_image_edit_plus": Case("qwen_image_edit_plus", (1, 512, 768), reference=(32, 8)),
    "qwen_image_edit_plus_reference_at_time_0": Case(
        "qwen_image_edit_plus", (1, 512, 768), reference=(32, 8), config={"zero_cond_t": True}
    ),
    "z_image": Case("z_image", (1, 20, 28)),
    "z_image_dynamic_shift": Case("z_image", (1, 20, 28), scheduler=_dynamic_shift),
}


def changed(model: Any, config: Mapping[str, Any]) -> Any:
    """Return a new model of the same class, with changes of the config."""
    kept = {key: x for key, x in model.config.items() if key != "_use_default_values"}  # these could not be changed
    new = type(model).from_config({**kept, **config})
    assert {key: new.config[key] for key in config} == dict(config)
    return new


@functools.cache
def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a case's pipeline, with equal random weights each time. Tests must not change it."""
    case = CASES[name]
    torch.manual_seed(0)
    pipe = PIPES[case.pipe].make()
    if case.scheduler is not None:
        pipe.register_modules(scheduler=case.scheduler())
    if case.vae is not None:
        pipe.register_modules(vae=case.vae())
    if case.change is not None:
        case.change(pipe)
    if case.config:
        pipe.register_modules(transformer=loud(changed(pipe.transformer, case.config)))
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(dtype)


def media(name: str, samples: int = len(CAPTIONS)) -> Media:
    """Return random pixels on the 8-bit grid, in [-1, 1], computed as the pipelines do."""
    case, generator = CASES[name], torch.Generator().manual_seed(1)
    sizes = {"pixels": case.size}
    if case.reference is not None:
        sizes["reference"] = (1, *case.reference)[-3:]
    others = {} if case.fps is None else {"fps": torch.full([samples], case.fps)}
    if case.sound:
        others["sound"] = torch.rand(samples, 2, case.sound, generator=generator) - 0.5
    return others | {
        key: torch.randint(256, (samples, 3, *size), generator=generator).float() / 255 * 2 - 1
        for key, size in sizes.items()
    }
