"""LTX-2 and MiniMax-H3 train on clips with and without sound with the recipe: equal losses at every topology."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from PIL import Image

from lightning_cp.latent_cache import LatentCache
from tests.e2e.finetune.test_finetune import LORA_FILE, tune
from tests.e2e.finetuning import frames_of, write_cache, write_pipeline
from tests.e2e.recipe import ROOT
from tests.families.cases import CASES
from tests.harness import warm
from tests.unit.finetune.media.encode import noise, write_clip, write_video

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
SMALL = ("lora.rank=4", "batch_size=2", "ema_decay=0.5", "max_steps=2", "warmup_steps=1")


def _clips(folder: Path, case: str, count: int) -> Path:
    """Write clips; the first one has no sound."""
    folder.mkdir()
    for i in range(count):
        if i:
            write_clip(folder / f"{i}.mkv", noise(2, 16_000), frames=max(24, CASES[case].size[0]))
        else:
            write_video(folder / f"{i}.mp4", frames_of(i, CASES[case].size))
        (folder / f"{i}.txt").write_text(f"wave number {i}\n")
    return folder


@pytest.mark.parametrize("case", ["ltx2", "ltx2_image", "minimax_h3"])
def test_three_ranks_equal_one_process(case: str, tmp_path: Path) -> None:
    made = write_cache(tmp_path / "made", case, count=4, write=_clips, fps=24.0)
    cache = LatentCache(made / "latents")
    assert [float(cache.sample(i)["sound_loss_mask"]) for i in range(4)] == [0.0, 1.0, 1.0, 1.0]
    experiment = f"finetune_{case.removesuffix('_image')}"
    alone = tune(made, "alone", *SMALL, experiment=experiment)
    three = tune(made, "three", *SMALL, "strategy=cp", "ring=3", experiment=experiment)
    assert three.losses == pytest.approx(alone.losses, rel=1e-4)
    assert len(set(alone.losses)) == len(alone.losses)
    assert (alone.folder / LORA_FILE).is_file()


def test_a_run_draws_samples(tmp_path: Path) -> None:
    made = write_cache(tmp_path / "made", "ltx2", count=2, write=_clips, fps=24.0)
    call = ("+sampling.call.spatio_temporal_guidance_blocks=[1]", "+sampling.call.max_sequence_length=64")
    prompts = ("sampling.prompts=[a red fox]", "sampling.every=2", "sampling.num_inference_steps=2", *call)
    run = tune(made, "drawn", *SMALL, *prompts, "strategy=cp", "ring=2", experiment="finetune_ltx2")
    (clip,) = (run.folder / "samples" / "final").iterdir()
    with Image.open(clip) as image:
        assert (image.size, image.n_frames) == ((96, 64), 17)


def test_a_modular_pipeline_is_encoded_trained_and_sampled(tmp_path: Path) -> None:
    """A folder without a model_index.json, from media to a clip with sound."""
    pipe, media = write_pipeline(tmp_path / "pipe", "minimax_h3"), _clips(tmp_path / "media", "minimax_h3", 2)
    assert not (pipe / "model_index.json").exists()
    quiet = ("accelerator=cpu", "progress=false")
    sizes = ("precompute.frames=22", "precompute.sizes=[[16,32]]", "precompute.fps=24", "precompute.max_upscale=2")
    pretrained = f"model.pretrained={pipe}"
    _recipe("precompute", tmp_path, pretrained, f"data.path={media}", f"output={tmp_path / 'latents'}", *sizes, *quiet)
    assert [row.frames for row in LatentCache(tmp_path / "latents").rows] == [22, 22]
    prompts = ("sampling.prompts=[a red fox]", "sampling.every=2", "sampling.num_inference_steps=3")
    size = ("+sampling.call.num_frames=124",)  # the shortest clip that the pipeline takes
    run = tune(tmp_path, "drawn", *SMALL, *prompts, *size, "strategy=cp", "ring=2", experiment="finetune_minimax_h3")
    (clip,) = (run.folder / "samples" / "final").iterdir()
    with Image.open(clip) as image:
        assert (image.size, image.n_frames) == ((32, 16), 124)
    folder = tmp_path / "sampled"
    call = ("+call.num_frames=124", "+call.height=16", "+call.width=32", "num_inference_steps=3")
    adapter = f"lora={run.folder / 'lora'}"
    _recipe(
        "sample", tmp_path, f"source={pipe}", adapter, "prompts=[a red fox]", f"hydra.run.dir={folder}", *call, *quiet
    )
    (drawn,) = (folder / "samples").iterdir()
    assert drawn.suffix == ".mp4"


def _recipe(name: str, folder: Path, *overrides: str) -> None:
    command = [sys.executable, str(ROOT / f"recipes/{name}.py"), *overrides]
    ran = warm.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=folder, timeout=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr
