"""Edit models train on pairs of pictures with the recipe: equal losses at every topology, and samples of a source."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.e2e.finetune.test_finetune import LORA_FILE, tune
from tests.e2e.finetuning import write_cache
from tests.e2e.recipe import ROOT, Finished
from tests.families.cases import made as tiny_pipeline
from tests.harness import warm

SMALL = ("lora.rank=4", "lora.alpha=32", "batch_size=2", "ema_decay=0.5")
CALL = ("+call.height=16", "+call.width=24", "+call._auto_resize=false", "+call.max_area=384")


@pytest.fixture(scope="module")
def kontext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a Kontext pipeline, three pairs of pictures and their cache."""
    return write_cache(tmp_path_factory.mktemp("kontext"), "flux_kontext", count=3)


@pytest.fixture(scope="module")
def alone(kontext: Path) -> Finished:
    """A LoRA of one process."""
    return tune(kontext, "alone", *SMALL, "max_steps=2", experiment="finetune_kontext")


def edited(made: Path, name: str, *overrides: str, source: str = "media/0.reference.png") -> np.ndarray:
    """Edit a picture with recipes/sample.py. Returns: its pixels."""
    command = [
        sys.executable,
        str(ROOT / "recipes/sample.py"),
        f"hydra.run.dir={made / name}",
        f"source={made / 'pipe'}",
    ]
    command += [
        f"image={made / source}",
        "prompts=[wave number 1]",
        "num_inference_steps=2",
        "progress=false",
        "accelerator=cpu",
    ]
    command += [f"output_root={made}", *CALL, *overrides]
    ran = warm.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=made, timeout=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return _picture(made / name / "samples" / "0000.png")


def check_equal(here: Finished, alone: Finished) -> None:
    assert here.losses == pytest.approx(alone.losses, rel=1e-4)
    assert len(set(alone.losses)) == len(alone.losses)


@pytest.mark.full
def test_kontext_on_three_ranks_equals_one_process(kontext: Path, alone: Finished) -> None:
    given = (*SMALL, "max_steps=2", "strategy=cp", "ring=3")
    check_equal(tune(kontext, "three", *given, experiment="finetune_kontext"), alone)


@pytest.mark.full
def test_an_edit_is_sampled_with_and_without_the_lora(kontext: Path, alone: Finished) -> None:
    lora = f"lora={alone.folder / LORA_FILE}"
    before = edited(kontext, "before")
    after = edited(kontext, "after", lora)
    assert before.shape == after.shape == (16, 24, 3)
    assert np.abs(before - after).max() > 0
    other = edited(kontext, "other", lora, source="media/1.reference.png")
    assert np.abs(other - after).max() > 0
    parallel = edited(kontext, "parallel", lora, "strategy=cp", "ring=2")
    assert np.abs(parallel - after).max() <= 1


@pytest.mark.full
def test_pictures_are_edited_during_training(kontext: Path) -> None:
    sources = [f"media/{i}.reference.png" for i in (0, 1)]
    prompts = ",".join(f"{{prompt: wave number 1, image: {kontext / source}}}" for source in sources)
    drawing = ("sampling.every=2", f"sampling.prompts=[{prompts}]", "sampling.num_inference_steps=2")
    call = ("+sampling.call._auto_resize=false", "+sampling.call.max_area=384")
    given = (*SMALL, "max_steps=2", *drawing, *call)
    one, three = (
        tune(kontext, f"drawn{i}", *given, *ranks, experiment="finetune_kontext")
        for i, ranks in enumerate([(), ("strategy=cp", "ring=3")])
    )
    drawn = [_picture(one.folder / f"samples/final/000{i}.png") for i in (0, 1)]
    for i, source in enumerate(sources):
        assert np.abs(drawn[i] - _picture(three.folder / f"samples/final/000{i}.png")).max() <= 1
        later = edited(kontext, f"later{i}", f"lora={one.folder / LORA_FILE}", f"seed={i}", source=source)
        assert np.abs(drawn[i] - later).max() <= 1
    assert np.abs(drawn[0] - drawn[1]).max() > 1


def _picture(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB")).astype(float)


@pytest.mark.full
@pytest.mark.parametrize("case", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_qwen_image_edit_trains_and_samples(case: str, tmp_path: Path) -> None:
    made = write_cache(tmp_path / case, case, count=3)
    given = (*SMALL, "max_steps=2")
    alone = tune(made, "alone", *given, experiment="finetune_qwen_image_edit")
    for ring in (2, 3):
        here = tune(made, f"ring{ring}", *given, "strategy=cp", f"ring={ring}", experiment="finetune_qwen_image_edit")
        check_equal(here, alone)
    pipe = copy.deepcopy(tiny_pipeline(case))  # the folder's processor needs torchvision: the test's does not
    with Image.open(made / "media" / "0.reference.png") as image:
        call = {"image": image.convert("RGB"), "prompt": "wave number 1", "height": 512, "width": 768}
    call |= {"num_inference_steps": 2, "output_type": "np"}
    before = pipe(**call, generator=torch.Generator().manual_seed(0)).images
    pipe.load_lora_weights(str(alone.folder / "lora"))
    after = pipe(**call, generator=torch.Generator().manual_seed(0)).images
    assert before.shape == (1, 512, 768, 3)
    assert np.abs(before - after).max() > 0
    with pytest.raises(AssertionError, match=rf"cond_dropout=0\.1 must be 0 for {case}"):
        tune(made, "dropped", *given, "cond_dropout=0.1", experiment="finetune_qwen_image_edit")


@pytest.mark.full
def test_flux2_trains_with_sources(tmp_path: Path) -> None:
    made = write_cache(tmp_path / "flux2", "flux2_reference", count=3)
    alone = tune(made, "alone", *SMALL, "max_steps=2", experiment="finetune_flux2")
    check_equal(tune(made, "three", *SMALL, "max_steps=2", "strategy=cp", "ring=3", experiment="finetune_flux2"), alone)
