"""Noise on the first frames of CogVideoX image to video."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp.errors import FamilyError, StaleCacheError
from lightning_cp.finetune.families.latents import latent_mode
from lightning_cp.finetune.precompute.encode import noised_frame
from lightning_cp.latent_cache import LatentCache
from lightning_cp.media import Bucket, find_sources, load_media
from tests.families.cases import CASES, made
from tests.unit.finetune.precompute.made import PICTURES, clips, encoded, pictures, pipeline

pytestmark = pytest.mark.filterwarnings("ignore")
CASE = "cogvideox_image"


def test_the_strength_is_log_normal_and_depends_on_the_name_only() -> None:
    pixels = torch.linspace(-1, 1, 3 * 2 * 8 * 8).view(3, 2, 8, 8)
    noise = [noised_frame(pixels, f"clip {i}") - pixels[:, :1] for i in range(400)]
    assert noise[0].shape == (3, 1, 8, 8)
    strengths = torch.stack([x.std() for x in noise]).log()
    assert strengths.mean().item() == pytest.approx(-3, abs=0.1)
    assert strengths.std().item() == pytest.approx(0.5, abs=0.06)
    shape = torch.cat([(x / x.std()).flatten() for x in noise])
    assert (shape.abs() < 1).float().mean().item() == pytest.approx(math.erf(2**-0.5), abs=0.01)
    torch.testing.assert_close(noised_frame(pixels * 0, "clip 7"), noise[7], rtol=0, atol=1e-6)


def test_only_the_condition_gets_noise(tmp_path: Path) -> None:
    pipe, data = pipeline(tmp_path / "pipe", CASE), clips(tmp_path / "data", 2, frames=9)
    frames, height, width = CASES[CASE].size
    settings: dict[str, Any] = {"sizes": [[height, width]], "frames": frames, "dtype": torch.float32, "sheet": 0}
    encoded(pipe, data, tmp_path / "clean", settings)
    encoded(pipe, data, tmp_path / "noised", {**settings, "image_noise": True})
    clean, noised = LatentCache(tmp_path / "clean"), LatentCache(tmp_path / "noised")
    for i, source in enumerate(find_sources(data).sources):
        media = load_media(source, [Bucket(frames, height, width)])
        expected = latent_mode(made(CASE).vae, noised_frame(media.pixels, source.id)[None])[0]
        assert torch.equal(noised.sample(i)["condition"], expected)
        assert not torch.equal(clean.sample(i)["condition"], expected)
        assert torch.equal(clean.sample(i)["latents"], noised.sample(i)["latents"])
    with pytest.raises(StaleCacheError, match=r"settings\.image_noise was true and is false"):
        encoded(pipe, data, tmp_path / "noised", settings)


def test_other_families_refuse_it(tmp_path: Path) -> None:
    pipe, data = pipeline(tmp_path / "pipe"), pictures(tmp_path / "data", 1)
    with pytest.raises(FamilyError, match=r"precompute\.image_noise\) is for CogVideoX image to video, not for flux"):
        encoded(pipe, data, tmp_path / "out", {**PICTURES, "image_noise": True})
