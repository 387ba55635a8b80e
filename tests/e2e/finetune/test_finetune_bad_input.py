"""Bad input of fine-tuning: one clear error, before the ranks start or on every rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import diffusers
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


def _change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


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
def test_a_cache_of_another_text_encoder_or_tokenizer(flux: Path) -> None:
    pipe = _copied(flux, "other_text")
    _change_config(pipe / "text_encoder_2", relative_attention_max_distance=99)
    (pipe / "tokenizer" / "added.txt").write_text("a word")
    error = error_of(_tune(flux, "stale_text", *RANKS, pipe=pipe))
    assert "was encoded with another text_encoder_2 and another tokenizer than" in error or (
        "was encoded with another tokenizer and another text_encoder_2 than" in error
    )


@pytest.mark.full
def test_a_pipeline_saved_in_other_shards_fits(flux: Path) -> None:
    from diffusers import AutoencoderKL

    pipe = _copied(flux, "sharded")
    shutil.rmtree(pipe / "vae")
    AutoencoderKL.from_pretrained(flux / "pipe/vae").save_pretrained(pipe / "vae", max_shard_size="4KB")
    assert len(list((pipe / "vae").glob("*.safetensors"))) > 1
    finished = _tune(flux, "fits", pipe=pipe)
    assert finished.exit_code == 0, finished.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("in_channels", 32, "its VAE makes latent channels 16, but the transformer has in_channels=32"),
        (
            "joint_attention_dim",
            48,
            "its text encoder makes text embeddings of width 32, but the transformer has joint",
        ),
    ],
)
def test_parts_that_do_not_fit(flux: Path, key: str, value: int, message: str) -> None:
    pipe = _copied(flux, f"other_{key}")
    _change_config(pipe / "transformer", **{key: value})
    assert message in error_of(_tune(flux, f"parts_{key}", *RANKS, pipe=pipe))


@pytest.mark.full
def test_weights_that_do_not_fit_their_config(flux: Path) -> None:
    pipe = _copied(flux, "fewer_layers")
    _change_config(pipe / "transformer", num_layers=3)
    assert "does not fit its config.json" in error_of(_tune(flux, "layers", *RANKS, pipe=pipe))


@pytest.mark.full
def test_a_pipeline_that_is_not_on_the_hub(flux: Path) -> None:
    """In a process of its own, because the variable is read when huggingface_hub is imported."""
    given = ("experiment=finetune_flux", "model.pretrained=nobody/nothing", f"data.path={flux / 'latents'}")
    folder, offline = flux / "hub", {"HF_HUB_OFFLINE": "1"}
    finished = run(*given, *SMALL, *RANKS, folder=folder, timeout_s=400, environment=offline, cold=True)
    assert "model.pretrained=nobody/nothing is not a folder, and cannot be downloaded: " in error_of(finished)


@pytest.mark.full
def test_a_lora_target_that_matches_nothing(flux: Path) -> None:
    error = error_of(_tune(flux, "target", *RANKS, "lora.targets=[to_qq]"))
    assert "lora.targets: 'to_qq' matches no layer of FluxTransformer2DModel; the closest layers are to_q" in error


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


@pytest.mark.full
def test_validation_larger_than_the_data(flux: Path) -> None:
    finished = _tune(flux, "validation", *RANKS, "data.validation=6", "validation.every=1")
    assert "data.validation=6 must be less than 6, the number of samples" in error_of(finished)


@pytest.mark.full
def test_validation_larger_than_a_folder_of_media(flux: Path) -> None:
    given = ("data=folder", f"data.path={flux / 'media'}", "data.sizes=[[16,24]]", "data.frames=1")
    finished = _tune(flux, "validation_of_media", *RANKS, *given, "data.validation=6", "validation.every=1")
    assert f"data.validation=6 must be less than 6, the number of files in data.path={flux / 'media'}" in error_of(
        finished
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(
            ("sampling.every=2",), "sampling.every=2 and sampling.prompts=null belong together", marks=pytest.mark.full
        ),
        (("sampling.every=2", "sampling.prompts=7"), "sampling.prompts=7 is not valid"),
        pytest.param(
            ("sampling.every=2", "sampling.prompts=[a cat]", "sampling.fps=0"),
            "sampling.fps=0 is not valid",
            marks=pytest.mark.full,
        ),
        (
            ("sampling.every=2", "sampling.prompts=[{seed: 1}]"),
            "sampling.prompts: entry 1 has prompt=None: must be",
        ),
        pytest.param(
            ("sampling.every=2", "sampling.prompts=[{prompt: a cat, image: no.png}]"),
            "has image=no.png, which does not exist",
            marks=pytest.mark.full,
        ),
        (("sampling=midpoint", "sampling.every=2"), "needs sampling=prompts"),
    ],
)
@pytest.mark.default(1)
def test_settings_that_contradict(flux: Path, overrides: tuple[str, ...], message: str) -> None:
    assert message in error_of(_tune(flux, "settings", *overrides))


@pytest.mark.full
def test_a_cache_with_other_facts(flux: Path) -> None:
    latents = Path(shutil.copytree(flux / "latents", flux / "other_facts"))
    index = json.loads((latents / "index.json").read_text())
    index["facts"]["scaling_factor"] = 0
    (latents / "index.json").write_text(json.dumps(index))
    error = error_of(_tune(flux, "facts", *RANKS, f"data.path={latents}"))
    assert f"data.path={latents} has scaling_factor=0, but the VAE of model.pretrained={flux / 'pipe'} has" in error


@pytest.mark.full
def test_a_pipeline_of_an_unknown_class(flux: Path) -> None:
    pipe = _copied(flux, "unknown_class")
    index = json.loads((pipe / "model_index.json").read_text())
    (pipe / "model_index.json").write_text(json.dumps({**index, "_class_name": "NoSuchPipeline"}))
    error = error_of(_tune(flux, "unknown", *RANKS, pipe=pipe))
    assert f"model.pretrained={pipe}: diffusers {diffusers.__version__} has no NoSuchPipeline" in error
