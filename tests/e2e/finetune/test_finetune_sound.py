"""LTX-2 trains on clips with and without sound with the recipe: equal losses at every topology, and samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from lightning_cp.latent_cache import LatentCache
from tests.e2e.finetune.test_finetune import LORA_FILE, tune
from tests.e2e.finetuning import frames_of, write_cache
from tests.unit.finetune.media.encode import noise, write_clip, write_video

pytestmark = pytest.mark.full
SMALL = ("lora.rank=4", "batch_size=2", "ema_decay=0.5", "max_steps=2", "warmup_steps=1")


def _clips(folder: Path, case: str, count: int) -> Path:
    """Write clips; the first one has no sound."""
    folder.mkdir()
    for i in range(count):
        if i:
            write_clip(folder / f"{i}.mkv", noise(2, 16_000))
        else:
            write_video(folder / f"{i}.mp4", frames_of(i, (17, 64, 96)))
        (folder / f"{i}.txt").write_text(f"wave number {i}\n")
    return folder


@pytest.mark.parametrize("case", ["ltx2", "ltx2_image"])
def test_three_ranks_equal_one_process(case: str, tmp_path: Path) -> None:
    made = write_cache(tmp_path / "made", case, count=4, write=_clips, fps=24.0)
    cache = LatentCache(made / "latents")
    assert [float(cache.sample(i)["sound_loss_mask"]) for i in range(4)] == [0.0, 1.0, 1.0, 1.0]
    alone = tune(made, "alone", *SMALL, experiment="finetune_ltx2")
    three = tune(made, "three", *SMALL, "strategy=cp", "ring=3", experiment="finetune_ltx2")
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
