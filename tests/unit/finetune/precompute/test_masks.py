"""Masks of the loss: stored for every sample, cut like the pixels, and read by the objectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_cp.errors import StaleCacheError
from lightning_cp.families import collate
from lightning_cp.finetune.families.latents import by_name
from lightning_cp.latent_cache import LatentCache
from lightning_cp.objectives import objective_for
from tests.families.cases import CASES
from tests.unit.finetune.media.encode import write_video
from tests.unit.finetune.precompute.made import PICTURES, encoded, pipeline, pixels
from tests.unit.finetune.precompute.test_encode import KINDS

pytestmark = pytest.mark.filterwarnings("ignore")


def _write(folder: Path, case: str, name: str, seed: int) -> Path:
    """Write a picture or a clip of a case's size, twice as large, with its reference."""
    frames, height, width = CASES[case].size
    folder.mkdir(exist_ok=True)
    picture = pixels(seed, 2 * height, 2 * width)
    is_clip = frames > 1
    if is_clip:
        write_video(folder / f"{name}.mp4", [np.roll(picture, t, axis=1) for t in range(frames)])
    else:
        Image.fromarray(picture).save(folder / f"{name}.png")
    reference = CASES[case].reference
    if reference is not None and len(reference) == 3:
        write_video(folder / f"{name}.reference.mp4", [picture] * frames)
    elif reference is not None:
        Image.fromarray(picture).save(folder / f"{name}.reference.png")
    (folder / f"{name}.txt").write_text("a text")
    return folder


def _mask(folder: Path, case: str, name: str = "a") -> None:
    """White in the left half."""
    _, height, width = CASES[case].size
    mask = np.zeros((2 * height, 2 * width), np.uint8)
    mask[:, :width] = 255
    Image.fromarray(mask).save(folder / f"{name}.mask.png")


@pytest.mark.parametrize("case", ["cogvideox", *KINDS])
@pytest.mark.default(1)
def test_the_loss_has_the_mask_of_the_picture(case: str, tmp_path: Path) -> None:
    pipe, data = pipeline(tmp_path / "pipe", case), tmp_path / "data"
    for seed, name in enumerate("ab"):
        _write(data, case, name, seed)
    _mask(data, case)
    frames, height, width = CASES[case].size
    settings: dict[str, Any] = {"sizes": [[height, width]], "frames": frames, "dtype": torch.float32, "sheet": 0}
    settings["fps"] = 24.0 if frames > 1 else None
    done = encoded(pipe, data, tmp_path / "out", settings)
    assert not done.skipped
    cache = LatentCache(tmp_path / "out")
    family, samples = cache.family(), [cache.sample(i) for i in range(2)]
    stored = collate(samples, family.text)
    noised = objective_for(family, seed=0).noised(family, stored, step=0)
    (name, target), *_ = by_name(noised.target).items()
    half, weights = target.shape[-1] // 2, noised.loss_mask[name].float().expand_as(target)
    given = family.given_mask(stored, family.clean(stored))
    free = torch.ones_like(target) if given is None else (~by_name(given)[name]).float().expand_as(target)
    assert torch.equal(weights[1], free[1])  # without a mask
    right = half + target.shape[-1] % 2  # the column between both halves has both
    assert (weights[0, ..., right:] < 0.05).all()  # resizing blurs the edge
    assert (weights[0, ..., :half] - free[0, ..., :half]).abs().max() < 0.05
    assert weights[0].sum() > 0


def test_masks_that_change_are_encoded_again(tmp_path: Path) -> None:
    pipe, data, out = pipeline(tmp_path / "pipe"), tmp_path / "data", tmp_path / "out"
    for seed, name in enumerate("abc"):
        _write(data, "flux", name, seed)
    _mask(data, "flux")
    settings = {**PICTURES, "sizes": [list(CASES["flux"].size[1:])]}
    encoded(pipe, data, out, settings)
    before = LatentCache(out).sample(0)["loss_mask"]
    Image.open(data / "a.mask.png").rotate(180).save(data / "a.mask.png")
    done = encoded(pipe, data, out, settings)
    assert (done.encoded, done.stored, done.changed) == (1, 2, 1)
    torch.testing.assert_close(LatentCache(out).sample(0)["loss_mask"], before.flip(-1), rtol=0, atol=0.02)
    _mask(data, "flux", "b")
    done = encoded(pipe, data, out, settings)
    assert (done.encoded, done.stored) == (1, 2)
    Image.new("L", (5, 7)).save(data / "c.mask.png")
    (skipped,) = encoded(pipe, data, out, settings).skipped
    assert "is a mask of 5x7 pixels, but its picture or clip has" in skipped.reason
    for name in "abc":
        (data / f"{name}.mask.png").unlink()
    with pytest.raises(StaleCacheError, match=r"settings\.masks was true and is false"):
        encoded(pipe, data, out, settings)
