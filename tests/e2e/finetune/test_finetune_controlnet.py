"""Side models train with the recipe, with the base frozen: equal at every topology, and diffusers loads them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lightning_cp.finetune import new_controlnet
from lightning_cp.precompute import PrecomputeSettings, precompute
from tests.e2e.finetune.test_finetune import QUICK, tune, val_losses
from tests.e2e.finetuning import write_cache, write_pipeline
from tests.e2e.recipe import ROOT, Finished, error_of, run
from tests.harness import warm

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
SMALL = ("batch_size=2", "ema_decay=0.5", "max_steps=2", "data.validation=1", "validation.every=1")
FLUX = "finetune_flux_controlnet"


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a pipeline, three pictures with control pictures, and their cache."""
    return write_cache(tmp_path_factory.mktemp("controlnet"), "flux_controlnet_guidance", count=3)


@pytest.fixture(scope="module")
def alone(flux: Path) -> Finished:
    """A ControlNet of one process."""
    return tune(flux, "alone", *SMALL, experiment=FLUX)


def weights(folder: Path, component: str = "controlnet") -> dict[str, torch.Tensor]:
    """The weights of a model in a folder."""
    (file,) = (folder / component).glob("*.safetensors")
    return load_file(file)


def check_equal(here: Finished, alone: Finished, component: str = "controlnet") -> None:
    """Compare losses and exported weights."""
    assert here.losses == pytest.approx(alone.losses, rel=1e-4)
    assert val_losses(here) == pytest.approx(val_losses(alone), rel=1e-4)
    assert len(set(val_losses(alone))) == 2
    found, expected = weights(here.folder, component), weights(alone.folder, component)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-3, atol=1e-4)


@pytest.mark.full  # tests/dist/finetune/test_side_models.py compares ControlNets across ranks by default
def test_a_controlnet_on_three_ranks_equals_one_process(flux: Path, alone: Finished) -> None:
    assert len(set(alone.losses)) == 2
    check_equal(tune(flux, "three", *SMALL, "strategy=cp", "ring=3", experiment=FLUX), alone)


@pytest.mark.full
@pytest.mark.parametrize(
    "ranks",
    [
        ("strategy=cp", "ring=2", "data_parallel=2"),
        ("strategy=cp_fsdp", "ring=3"),
        ("strategy=cp", "ulysses=2", "trainer=lightning"),
        ("strategy=cp", "ring=2", "activation_checkpointing=full", "micro_batch_size=1"),
        ("strategy=cp", "ring=2", "activation_checkpointing=selective"),
    ],
    ids=["data", "fsdp", "trainer", "checkpointing", "selective"],
)
def test_a_controlnet_is_the_same_at_every_topology(flux: Path, alone: Finished, ranks: tuple[str, ...]) -> None:
    check_equal(tune(flux, "_".join(ranks), *SMALL, *ranks, experiment=FLUX), alone)


@pytest.mark.full
def test_diffusers_loads_the_controlnet_and_samples_change(flux: Path, alone: Finished) -> None:
    from diffusers import FluxControlNetModel, FluxControlNetPipeline

    before: Any = FluxControlNetPipeline.from_pretrained(flux / "pipe")
    trained = FluxControlNetModel.from_pretrained(alone.folder / "controlnet")
    after: Any = FluxControlNetPipeline.from_pretrained(flux / "pipe", controlnet=trained)
    assert not (alone.folder / "transformer").exists()
    with Image.open(flux / "media" / "0.reference.png") as image:
        call = {"control_image": image.convert("RGB"), "prompt": "wave number 1", "height": 16, "width": 24}
    call |= {"num_inference_steps": 2, "output_type": "np"}
    pictures = [pipe(**call, generator=torch.Generator().manual_seed(0)).images for pipe in (before, after)]
    assert np.abs(pictures[0] - pictures[1]).max() > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "component", "trained"),
    [
        ("flux_controlnet_double", "controlnet", ""),
        ("qwen_image_controlnet", "controlnet", ""),
        ("wan_vace", "transformer", "vace_"),
        ("wan_vace_two_experts", "transformer_2", "vace_"),
    ],
)
def test_other_side_models_train_at_every_topology(case: str, component: str, trained: str, tmp_path: Path) -> None:
    made = write_cache(tmp_path / case, case, count=3)
    pipeline = {"flux_controlnet_double": "flux_controlnet", "wan_vace_two_experts": "wan_vace"}.get(case, case)
    experiment, given = f"finetune_{pipeline}", (*SMALL, f"model.component={component}")
    alone = tune(made, "alone", *given, experiment=experiment)
    for ranks in (("strategy=cp", "ring=3"), ("strategy=cp_fsdp", "ring=2", "activation_checkpointing=full")):
        check_equal(tune(made, "_".join(ranks), *given, *ranks, experiment=experiment), alone, component)
    before, after = weights(made / "pipe", component), weights(alone.folder, component)
    changed = {name for name, x in after.items() if not torch.equal(x, before[name])}
    assert changed
    assert all(name.startswith(trained) for name in changed)
    if trained:  # frozen weights are not in checkpoints
        assert all(torch.equal(x, before[name]) for name, x in after.items() if not name.startswith(trained))


@pytest.mark.full
def test_a_frozen_base_in_half_precision(flux: Path) -> None:
    prompts = f"sampling.prompts=[{{prompt: wave, image: {flux / 'media/0.reference.png'}}}]"
    drawing = ("sampling.every=1", prompts, "sampling.num_inference_steps=1")
    given = (*SMALL, "model.dtype=bfloat16", *drawing)
    alone = tune(flux, "half", *given, experiment=FLUX)
    assert {x.dtype for x in weights(alone.folder).values()} == {torch.float32}
    for ranks in (("strategy=cp", "ring=3"), ("strategy=cp_fsdp", "ring=3")):
        here = tune(flux, "_".join(("half", *ranks)), *given, *ranks, experiment=FLUX)
        assert here.losses == pytest.approx(alone.losses, rel=2e-2)
        assert _picture(here.folder / "samples/final/0000.png").shape == (16, 24, 3)


@pytest.mark.full
@pytest.mark.parametrize(
    "ranks",
    [("strategy=cp",), ("strategy=cp_fsdp",), ("strategy=cp_fsdp", "trainer=lightning")],
    ids=["cp", "cp_fsdp", "trainer"],
)
def test_pictures_are_drawn_from_control_pictures_during_training(flux: Path, ranks: tuple[str, ...]) -> None:
    prompts = [{"prompt": "wave number 1", "image": str(flux / f"media/{i}.reference.png")} for i in (0, 1)]
    (flux / "prompts.yaml").write_text(json.dumps(prompts))
    given = (*SMALL, "sampling.every=1", f"sampling.prompts={flux / 'prompts.yaml'}", "sampling.num_inference_steps=2")
    alone = tune(flux, "_".join(("drawn", *ranks)), *given, experiment=FLUX)
    three = tune(flux, "_".join(("drawn3", *ranks)), *given, *ranks, "ring=3", experiment=FLUX)
    pictures = [[_picture(here.folder / f"samples/final/000{i}.png") for i in (0, 1)] for here in (alone, three)]
    for one, other in zip(*pictures, strict=True):
        assert np.abs(one - other).max() <= 1
    assert np.abs(pictures[0][0] - pictures[0][1]).max() > 1, "the control pictures differ"


@pytest.mark.full
def test_wan_vace_draws_without_a_control_during_training(tmp_path: Path) -> None:
    made = write_cache(tmp_path, "wan_vace", count=3)
    drawing = ("sampling.every=1", "sampling.prompts=[wave number 1]", "sampling.num_inference_steps=2")
    given = (*SMALL, *drawing, "+sampling.call.max_sequence_length=24")
    alone, three = (
        tune(made, name, *given, *ranks, experiment="finetune_wan_vace")
        for name, ranks in (("alone", ()), ("three", ("strategy=cp", "ring=3")))
    )
    one, other = (_picture(run.folder / "samples/final/0000.gif") for run in (alone, three))
    assert np.abs(one - other).max() <= 3  # colours of a GIF


@pytest.mark.full
def test_a_new_controlnet_is_trained_and_sampled(flux: Path, tmp_path: Path) -> None:
    base = write_pipeline(tmp_path / "base", "flux_without_guidance")
    pipe = new_controlnet(base, tmp_path / "pipe", num_layers=1, num_single_layers=1)
    settings = PrecomputeSettings(sizes=[[16, 24]], dtype=torch.float32, sheet=0, max_upscale=2)
    precompute(str(pipe), flux / "media", tmp_path / "latents", settings=settings, device=torch.device("cpu"))
    tuned = tune(tmp_path, "tuned", *SMALL, "strategy=cp", "ring=2", "objective.guidance=null", experiment=FLUX)
    before = sampled(tmp_path, "before", flux / "media/0.reference.png")
    shutil.rmtree(pipe / "controlnet")
    shutil.copytree(tuned.folder / "controlnet", pipe / "controlnet")
    after, other = (sampled(tmp_path, f"after{i}", flux / f"media/{i}.reference.png") for i in (0, 1))
    assert np.abs(before - after).max() > 0
    assert np.abs(other - after).max() > 0
    assert (base / "transformer").is_dir()


def sampled(made: Path, name: str, control: Path) -> np.ndarray:
    """Sample with a control picture and recipes/sample.py on two ranks. Returns: its pixels."""
    command = [sys.executable, str(ROOT / "recipes/sample.py"), f"hydra.run.dir={made / name}", f"output_root={made}"]
    command += [f"source={made / 'pipe'}", f"image={control}", "prompts=[wave number 1]", "num_inference_steps=2"]
    command += ["+call.height=16", "+call.width=24", "progress=false", "accelerator=cpu", "strategy=cp", "ring=2"]
    ran = warm.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=made, timeout=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return _picture(made / name / "samples" / "0000.png")


@pytest.mark.full
def test_a_run_is_resumed(flux: Path, alone: Finished) -> None:
    first = tune(flux, "first", *SMALL, "max_steps=1", experiment=FLUX)
    resumed = tune(flux, "resumed", *SMALL, f"resume={first.folder / 'checkpoints/step_00000001'}", experiment=FLUX)
    assert resumed.losses[1:] == pytest.approx(alone.losses[1:], rel=1e-4)
    for name, x in weights(alone.folder).items():
        torch.testing.assert_close(weights(resumed.folder)[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_wrong_settings_are_one_error(flux: Path) -> None:
    for overrides, message in (
        (("lora={rank: 4}",), "lora must be null for flux_controlnet, which trains weights of its controlnet without"),
        (("model.component=transformer",), "model.component=transformer must be controlnet for flux_controlnet"),
    ):
        given = (f"experiment={FLUX}", f"model.pretrained={flux / 'pipe'}", f"data.path={flux / 'latents'}")
        folder = flux / overrides[0].split("=")[0]
        finished = run(*given, *QUICK, *SMALL, *overrides, "strategy=cp", "ring=2", folder=folder, timeout_s=400)
        assert message in error_of(finished)


def _picture(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB")).astype(float)
