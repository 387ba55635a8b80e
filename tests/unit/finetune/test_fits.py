"""A cache or LoRA with values that the pipeline cannot train with is refused by name, before training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, FlowMatchEulerDiscreteScheduler, SchedulerMixin
from safetensors.torch import save_file

from lightning_cp.errors import FamilyError
from lightning_cp.families import load_family
from lightning_cp.finetune.adapters.lora_file import load_loras, read_lora
from lightning_cp.finetune.families.schedule import diffusion_facts
from lightning_cp.finetune.fits import check_cache, check_fits, pipeline_facts

FACTS: dict[str, Any] = {
    "pixels": 16,
    "shift_factor": 0.5,
    "scaling_factor": 0.25,
    "guidance_embeds": True,
    "text_length": 8,
    "shift": 3.0,
}
SAMPLE = {"latents": torch.ones(4, 2, 2), "prompt_embeds": torch.ones(8, 6), "pooled_embeds": torch.ones(6)}
VAE = {"scaling_factor": ("VAE", 0.25), "shift_factor": ("VAE", 0.5)}


def _check(facts: dict[str, Any], sample: dict[str, torch.Tensor], pipeline: dict[str, Any]) -> None:
    check_cache(Path("cache"), load_family("flux", {**FACTS, **facts}), {**SAMPLE, **sample}, "pipe", pipeline)


def _pipeline(folder: Path, scheduler: SchedulerMixin, **index: Any) -> Path:
    scheduler.save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(json.dumps({"scaling_factor": 0.25, "block_out_channels": [4]}))
    return folder


def test_facts_of_a_pipeline_are_read_from_its_files(tmp_path: Path) -> None:
    assert pipeline_facts(tmp_path, FACTS) == {}
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    facts = pipeline_facts(_pipeline(tmp_path / "a", scheduler, boundary_ratio=0.9), [*FACTS, "boundary_ratio"])
    assert facts == {
        "scaling_factor": ("VAE", 0.25),
        "boundary_ratio": ("configuration", 0.9),
        "shift": ("scheduler", 5.0),
    }
    with pytest.raises(
        FamilyError, match=r"has shift=3\.0, but the scheduler of .* has shift=5\.0: set objective\.shift"
    ):
        _check({}, {}, facts)
    check_cache(Path("cache"), load_family("flux", FACTS), SAMPLE, "pipe", facts, ["shift"])
    diffusion = _pipeline(tmp_path / "b", CogVideoXDDIMScheduler(prediction_type="v_prediction"))
    schedule = pipeline_facts(diffusion, ["schedule"])["schedule"][1]
    assert schedule == json.loads(json.dumps(diffusion_facts(CogVideoXDDIMScheduler(prediction_type="v_prediction"))))
    (diffusion / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "Flux"}')
    with pytest.raises(FamilyError, match="_class_name='Flux', which is no scheduler of diffusers"):
        pipeline_facts(diffusion, ["schedule"])


@pytest.mark.parametrize(
    ("name", "latents", "text"),
    [
        ("sana", "in_channels", "caption_channels"),
        ("pixart_sigma", "in_channels", "caption_channels"),
        ("hunyuan_video", "out_channels", "text_embed_dim"),
        ("wan_vace", "out_channels", "text_dim"),
        ("hunyuan_video15", "out_channels", "text_embed_dim"),
    ],
)
def test_widths_of_another_pipeline_are_named(name: str, latents: str, text: str) -> None:
    family = load_family(name, {})
    check_fits("pipe", "transformer", family, {latents: 4, text: 6}, SAMPLE)
    with pytest.raises(FamilyError, match=f"VAE makes latent channels 4, but the transformer has {latents}=16"):
        check_fits("pipe", "transformer", family, {latents: 16, text: 6}, SAMPLE)
    with pytest.raises(FamilyError, match=f"text embeddings of width 6, but the transformer has {text}=8"):
        check_fits("pipe", "transformer", family, {latents: 4, text: 8}, SAMPLE)


@pytest.mark.parametrize("name", ["flux_controlnet", "qwen_image_controlnet"])
def test_a_controlnet_of_other_widths_is_named(name: str) -> None:
    family = load_family(name, {})
    fits = {"in_channels": 16, "joint_attention_dim": 6}
    check_fits("pipe", "controlnet", family, fits, SAMPLE)
    for key, message in (
        ("in_channels", "VAE makes latent channels 16, but the controlnet has in_channels=32"),
        ("joint_attention_dim", "text embeddings of width 6, but the controlnet has joint_attention_dim=32"),
    ):
        with pytest.raises(FamilyError, match=message):
            check_fits("pipe", "controlnet", family, {**fits, key: 32}, SAMPLE)


def test_facts_and_dtypes_that_fit_pass() -> None:
    _check({}, {}, VAE)
    schedule = diffusion_facts(CogVideoXDDIMScheduler(prediction_type="v_prediction", beta_schedule="linear"))
    on_another_machine = {**schedule, "alphas_cumprod": [x * (1 + 1e-6) for x in schedule["alphas_cumprod"]]}
    _check({"schedule": on_another_machine}, {}, {"schedule": ("scheduler", schedule)})
    other = {**schedule, "alphas_cumprod": [x * (1 - 1e-3) for x in schedule["alphas_cumprod"]]}
    with pytest.raises(FamilyError, match="has schedule="):
        _check({"schedule": other}, {}, {"schedule": ("scheduler", schedule)})
    krea2 = load_family("krea2", {**FACTS, "is_distilled": False})
    mask = {"prompt_mask": torch.ones(8, dtype=torch.bool)}
    check_cache(Path("cache"), krea2, {**SAMPLE, **mask}, "pipe", {})
    _check({}, {"text_mask": torch.ones(8, dtype=torch.int64)}, {})
    _check({}, {"latents": torch.ones(4, 2, 2, dtype=torch.bfloat16), "source": torch.ones(1, dtype=torch.int64)}, {})


@pytest.mark.parametrize(
    ("facts", "sample", "vae", "message"),
    [
        (
            {"scaling_factor": 0},
            {},
            VAE,
            r"data\.path=cache has scaling_factor=0, but the VAE of .*scaling_factor=0\.25",
        ),
        ({"shift_factor": 0.1}, {}, VAE, r"has shift_factor=0\.1, but .* has shift_factor=0\.5: encode the data"),
        ({"scaling_factor": 0}, {}, {}, "has scaling_factor=0, which must be positive"),
        ({"scaling_factor": math.inf}, {}, {}, "has scaling_factor=inf, which must be positive"),
        ({"scaling_factor": "1"}, {}, {}, "has scaling_factor=1, which must be positive"),
        (
            {},
            {"latents": torch.ones(4, 2, 2, dtype=torch.int64)},
            VAE,
            r"latents in torch\.int64, which must be a float",
        ),
        ({}, {"pooled_embeds": torch.ones(6, dtype=torch.bool)}, VAE, r"has pooled_embeds in torch\.bool"),
    ],
)
def test_facts_and_dtypes_that_do_not_fit_are_named(
    facts: dict[str, Any], sample: dict[str, torch.Tensor], vae: dict[str, Any], message: str
) -> None:
    with pytest.raises(FamilyError, match=message):
        _check(facts, sample, vae)


@pytest.mark.parametrize(
    ("b", "metadata", "message"),
    [
        (torch.full((4, 2), math.nan), {}, r"its weight transformer\.x\.lora_B\.weight is not finite"),
        (torch.ones(4, 2, dtype=torch.int64), {}, r"lora_B\.weight is in torch\.int64, not a float dtype"),
        (torch.ones(4, 2), {"lora_adapter_metadata": "[" * 100_000}, "is damaged .*nested too deeply"),
        (torch.ones(4, 2), {"lora_adapter_metadata": "[]"}, "metadata must hold a JSON object"),
    ],
)
def test_a_lora_that_cannot_be_trained_is_named(
    tmp_path: Path, b: torch.Tensor, metadata: dict[str, str], message: str
) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"transformer.x.lora_A.weight": torch.ones(2, 4), "transformer.x.lora_B.weight": b}, file, metadata)
    with pytest.raises(ValueError, match=message):
        read_lora(file)
    if metadata.get("lora_adapter_metadata") != "[]":  # diffusers reads what is in it
        with pytest.raises(ValueError, match=message):
            load_loras(None, [file], [1])


LTX2 = {"in_channels": 4, "caption_channels": 16, "cross_attention_dim": 32, "audio_in_channels": 4}
CLIP = {"latents": torch.ones(4, 3, 2, 3), "prompt_embeds": torch.ones(8, 16), "sound": torch.ones(2, 17, 2)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, None),
        ({"use_prompt_embeddings": False, "cross_attention_dim": 16}, None),
        ({"in_channels": 8}, "its VAE makes latent channels 4, but the transformer has in_channels=8"),
        ({"caption_channels": 8}, "its text encoder makes text embeddings of width 16, but .* caption_channels=8"),
        ({"use_prompt_embeddings": False}, "text embeddings of width 16, but .* cross_attention_dim=32"),
        ({"audio_in_channels": 8}, "its audio VAE makes latents of sound of width 4, but .* audio_in_channels=8"),
    ],
)
def test_widths_of_a_clip_with_sound(config: dict[str, Any], message: str | None) -> None:
    given = "pipe", "transformer", load_family("ltx2", {}), {**LTX2, **config}, CLIP
    if message is None:
        check_fits(*given)
        return
    with pytest.raises(FamilyError, match=message):
        check_fits(*given)


def test_masks_of_text_may_have_any_dtype() -> None:
    masked = {"text_mask": torch.ones(8, dtype=torch.bool)}
    facts = {"text_length": 8, "scaling_factor": 1.0, "latents_std": [1.0]}
    check_cache(Path("cache"), load_family("ltx", facts), {**CLIP, **masked}, "pipe", {})


@pytest.mark.parametrize(
    ("fact", "component"), [("guidance_embeds", "transformer"), ("control_guidance_embeds", "controlnet")]
)
def test_a_model_with_guidance_does_not_train_on_a_cache_of_one_without(
    fact: str, component: str, tmp_path: Path
) -> None:
    (tmp_path / component).mkdir()
    (tmp_path / component / "config.json").write_text('{"guidance_embeds": true}')
    facts = pipeline_facts(tmp_path, [fact])
    with pytest.raises(FamilyError, match=rf"has {fact}=False, but the {component} of .* has {fact}=True: encode the"):
        check_cache(Path("cache"), load_family("flux", {**FACTS, fact: False}), SAMPLE, "pipe", facts)
    check_cache(Path("cache"), load_family("flux", {**FACTS, fact: True}), SAMPLE, "pipe", facts)
