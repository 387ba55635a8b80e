"""Families of pictures and of clips, end to end: a LoRA on four real pictures or clips at ring 2 × data 2.

Pictures are drawn on the way.
The tiny transformers have random weights, so they have to learn everything in their adapters: those are on all linear
layers here. Two regions of the same pictures or clips are held out, and their loss is at least halved.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from numpy.typing import NDArray
from PIL import Image, ImageSequence
from safetensors.torch import load_file

from lightning_cp.finetune import HeldOutData, Validation, load_transformer, split_validation
from lightning_cp.latent_cache import LatentCache
from lightning_cp.objectives import objective_for
from lightning_cp.training.ranks import DataShard
from tests.e2e.finetune.shipped_media import write_shipped
from tests.e2e.finetuning import write_cache
from tests.e2e.recipe import Finished, run
from tests.families.cases import CASES

PROMPTS = ("china", "flower", "a red fox")  # an odd number for two data groups
FAMILIES = ("flux", "flux2", "wan", "cogvideox")


@dataclass(frozen=True)
class Tuned:
    """A family's pipeline and cache, and a run on four ranks."""

    family: str
    made: Path
    settings: tuple[str, ...]
    four: Finished
    steps: int

    @property
    def every(self) -> int:
        """Steps between two validations, and two drawings."""
        return self.steps // 2

    @property
    def saved(self) -> int:
        """Step of the first checkpoint: in the middle of an epoch, which has two steps."""
        return self.every // 2 * 2 + 1


def _tune(made: Path, name: str, *overrides: str) -> Finished:
    finished = run(*overrides, folder=made / name, timeout_s=900)
    assert finished.exit_code == 0, finished.stdout + finished.stderr
    return finished


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((name, 40), id=f"{name}-40", marks=pytest.mark.full) for name in FAMILIES),
    ],
)
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """The run on four ranks."""
    family, steps = request.param
    every = steps // 2
    made = write_cache(tmp_path_factory.mktemp(family), family, write=write_shipped)
    settings = (
        f"experiment=finetune_{family}",
        f"model.pretrained={made / 'pipe'}",
        f"data.path={made / 'latents'}",
        *(
            "progress=false",
            "accelerator=cpu",
            f"warmup_steps={steps // 8}",
            "optim.lr=0.01",
            "batch_size=2",
            "ema_decay=0.9",
        ),
        "objective.sample_posterior=false",  # a random VAE's distribution is mostly noise, which cannot be learned
        *("lora.rank=16", "lora.alpha=32", "lora.targets=.*", "data.validation=2", f"validation.every={every}"),
    )
    prompts = (f"sampling.prompts=[{','.join(PROMPTS)}]", f"sampling.every={every}", "sampling.num_inference_steps=2")
    topology = ("strategy=cp", "ring=2", "data_parallel=2", f"max_steps={steps}")
    saves = f"checkpoint_every={every // 2 * 2 + 1}"
    return Tuned(family, made, settings, _tune(made, "four", *settings, *prompts, *topology, saves), steps)


def _frames(path: Path) -> NDArray[np.int16]:
    """Read a picture or a clip. Equal frames of a GIF in a row are stored once, and shown for longer."""
    found, shown = [], []
    with Image.open(path) as image:
        for frame in ImageSequence.Iterator(image):
            found.append(np.asarray(frame.convert("RGB")))
            shown.append(frame.info.get("duration", 1))
    counts = [time // min(shown) for time in shown]
    return np.repeat(np.stack(found), counts, axis=0).astype(np.int16)


def _loss_of_the_base(tuned: Tuned) -> float:
    """Validate the pipeline's own transformer, as the run does."""
    cache = LatentCache(tuned.made / "latents")
    _, held_out = split_validation([row.source for row in cache.rows], 2, seed=0)
    validation = Validation(HeldOutData(cache, held_out), cache.family(), objective_for(cache.family(), seed=0))
    base = load_transformer(tuned.made / "pipe", dtype=torch.float32)
    return validation.losses(base, Fabric(accelerator="cpu", devices=1), DataShard(0, 1)).loss


def test_validation_loss_is_halved(tuned: Tuned) -> None:
    losses = {row.step: row.val_loss for row in tuned.four.rows if not math.isnan(row.val_loss)}
    assert list(losses) == [tuned.every, tuned.steps]
    before = _loss_of_the_base(tuned)
    print(f"{tuned.family}: validation loss {before:.4f} -> {losses[tuned.steps]:.4f}")
    assert losses[tuned.steps] < 0.5 * before


def test_losses_equal_those_of_one_process(tuned: Tuned) -> None:
    alone = _tune(tuned.made, "alone", *tuned.settings, f"max_steps={min(tuned.steps, 20)}", f"lr_steps={tuned.steps}")
    assert len(set(alone.losses)) == min(tuned.steps, 20)
    assert alone.losses == pytest.approx(tuned.four.losses[:20], rel=1e-4)


def test_a_resume_at_another_topology_stays_on_the_curve(tuned: Tuned) -> None:
    """Resume in the middle of an epoch (two steps), without the pictures, which change nothing."""
    saved = tuned.four.folder / f"checkpoints/step_{tuned.saved:08d}"
    topology = ("strategy=cp", "ulysses=3", f"max_steps={tuned.steps}", f"resume={saved}")
    resumed = _tune(tuned.made, "resumed", *tuned.settings, *topology)
    assert resumed.losses == pytest.approx(tuned.four.losses, rel=1e-4)


def test_plain_diffusers_draws_the_same_pictures(tuned: Tuned) -> None:
    import diffusers

    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(tuned.made / "pipe")
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(str(tuned.four.folder / "lora"))
    frames, height, width = CASES[tuned.family].size
    size = {"height": height, "width": width, **({"num_frames": frames} if frames > 1 else {})}
    for i, prompt in enumerate(PROMPTS):
        seed = torch.Generator().manual_seed(i)
        call = {"prompt": prompt, "num_inference_steps": 2, "output_type": "pt", "return_dict": False, **size}
        drawn = pipe(generator=seed, **call)[0][0]
        expected = (drawn.movedim(-3, -1) * 255).round().numpy().reshape(-1, height, width, 3)  # CogVideoX: 8 frames
        (path,) = (tuned.four.folder / "samples/final").glob(f"{i:04d}.*")
        found = _frames(path)
        assert found.shape == expected.shape
        # GIFs have 256 colours
        assert np.abs(found - expected).mean() < (0.01 if path.suffix == ".png" else 8)
    names = sorted(path.name for path in (tuned.four.folder / "samples").iterdir())
    drawn_at = f"step_{tuned.every:08d}"
    assert names == ["final", "final.png", drawn_at, f"{drawn_at}.png"]
    assert "![Samples](samples.png)" in (tuned.four.folder / "lora/README.md").read_text()
    assert (tuned.four.folder / "lora/samples.png").is_file()


def test_comfyui_gets_the_same_weights(tuned: Tuned) -> None:
    """Read the file as ComfyUI does: W + alpha / rank · B · A, and no tensor that it does not know."""
    path = tuned.four.folder / "lora/comfyui.safetensors"
    if tuned.family in ("cogvideox", "flux2"):  # ComfyUI does not know all layers, which are all adapted here
        assert not path.exists()
        return
    ours, theirs = load_file(tuned.four.folder / "lora/pytorch_lora_weights.safetensors"), load_file(path)
    prefix = "diffusion_model." if tuned.family == "wan" else "transformer."
    layers = {name.rpartition(".lora_")[0] for name in ours}
    assert len(theirs) == 3 * len(layers)
    assert all(name.startswith(prefix) for name in theirs)
    assert {float(x) for name, x in theirs.items() if name.endswith(".alpha")} == {32.0}
    assert all(re.search(r"\.(lora_[AB]\.weight|alpha)$", name) for name in theirs)
