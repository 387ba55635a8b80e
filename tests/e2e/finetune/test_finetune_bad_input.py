"""Bad input of fine-tuning: one clear error, before the ranks start or on every rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.finetuning import write_cache, write_pipeline
from tests.e2e.recipe import Finished, error_of, run

RANKS = ("strategy=cp", "ring=3")
SMALL = ("progress=false", "accelerator=cpu", "batch_size=2", "max_steps=2", "lora.rank=4")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a Flux pipeline, six pictures and their cache."""
    return write_cache(tmp_path_factory.mktemp("flux"), "flux")


def _tune(made: Path, name: str, *overrides: str, pipe: Path | None = None) -> Finished:
    given = ("experiment=finetune_flux", f"model.pretrained={pipe or made / 'pipe'}", f"data.path={made / 'latents'}")
    return run(*given, *SMALL, *overrides, folder=made / name, timeout_s=400)


def _copied(made: Path, name: str) -> Path:
    return Path(shutil.copytree(made / "pipe", made / name))


@pytest.mark.full
def test_a_stale_cache(flux: Path) -> None:
    from diffusers import AutoencoderKL

    pipe = _copied(flux, "other_vae")
    vae = AutoencoderKL.from_pretrained(pipe / "vae")
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.mul_(1.01)
    vae.save_pretrained(pipe / "vae")
    error = error_of(_tune(flux, "stale", *RANKS, pipe=pipe))
    assert f"data.path={flux / 'latents'} was encoded with another vae than model.pretrained={pipe} has" in error


@pytest.mark.full
def test_parts_that_do_not_fit(flux: Path) -> None:
    pipe = _copied(flux, "other_channels")
    path = pipe / "transformer/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "in_channels": 32}))
    error = error_of(_tune(flux, "parts", *RANKS, pipe=pipe))
    assert "its VAE makes latent channels 16, but the transformer has in_channels=32" in error


@pytest.mark.full
def test_a_pipeline_that_is_not_on_the_hub(flux: Path) -> None:
    """In a process of its own, because the variable is read when huggingface_hub is imported."""
    given = ("experiment=finetune_flux", "model.pretrained=nobody/nothing", f"data.path={flux / 'latents'}")
    folder, offline = flux / "hub", {"HF_HUB_OFFLINE": "1"}
    finished = run(*given, *SMALL, *RANKS, folder=folder, timeout_s=400, environment=offline, cold=True)
    assert "model.pretrained=nobody/nothing is not a folder, and cannot be downloaded: " in error_of(finished)


@pytest.mark.full
def test_an_adapter_of_another_base(flux: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    from lightning_cp.export import save_lora
    from lightning_cp.finetune import LoraSettings, add_lora

    other = StableDiffusion3Pipeline.from_pretrained(write_pipeline(tmp_path / "sd3", "sd3")).transformer
    add_lora(other, LoraSettings(rank=4))
    save_lora(other, tmp_path / "lora")
    error = error_of(_tune(flux, "adapter", *RANKS, f"lora.file={tmp_path / 'lora'}"))
    assert f"lora.file={tmp_path / 'lora' / 'pytorch_lora_weights.safetensors'} is of another model" in error
