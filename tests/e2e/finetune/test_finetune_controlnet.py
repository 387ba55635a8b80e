"""Side models train with the recipe, with the base frozen: equal at every topology, and diffusers loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.e2e.finetune.test_finetune import tune
from tests.e2e.finetuning import write_cache
from tests.e2e.recipe import Finished

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
SMALL = ("batch_size=2", "ema_decay=0.5", "max_steps=2")
FLUX = "finetune_flux_controlnet"


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a pipeline, three pictures with control pictures, and their cache."""
    return write_cache(tmp_path_factory.mktemp("controlnet"), "flux_controlnet_guidance", count=3)


@pytest.fixture(scope="module")
def alone(flux: Path) -> Finished:
    """A ControlNet of one process."""
    return tune(flux, "alone", *SMALL, experiment=FLUX)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = (folder / "controlnet").glob("*.safetensors")
    return load_file(file)


def check_equal(here: Finished, alone: Finished) -> None:
    assert here.losses == pytest.approx(alone.losses, rel=1e-4)
    found, expected = weights(here.folder), weights(alone.folder)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-3, atol=1e-4)


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
