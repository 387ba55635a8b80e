"""Buckets lie on the family's grid, and media are cropped and resized to them without aliasing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_cp.errors import FamilyError, MediaError
from lightning_cp.families import Grid
from lightning_cp.finetune.media import Bucket, default_buckets, explicit_buckets, fit, nearest_bucket
from lightning_cp.finetune.media.buckets import Crop

IMAGES = Grid(pixels=16, frame_step=0, patch=(1, 2, 2))
VIDEOS = Grid(pixels=16, frame_step=4, patch=(1, 2, 2))


@pytest.mark.parametrize("step", [8, 16, 32, 64])
@pytest.mark.parametrize(("height", "width"), [(512, 512), (1024, 1024), (448, 832), (704, 1280), (64, 64)])
def test_default_buckets_have_at_most_the_area(step: int, height: int, width: int) -> None:
    grid = Grid(pixels=step, frame_step=0, patch=(1, 2, 2))
    buckets = default_buckets(grid, height=height, width=width)
    assert Bucket(1, height, width) in buckets
    assert len(set(buckets)) == len(buckets)
    assert list(buckets) == sorted(buckets)
    for bucket in buckets:
        grid.check(height=bucket.height, width=bucket.width, frames=bucket.frames)
        assert bucket.height * bucket.width <= height * width
        # one more step in both directions has a larger area
        assert (bucket.height + step) * (bucket.width + step) > height * width


def test_default_buckets_of_the_usual_size() -> None:
    sizes = [(bucket.height, bucket.width) for bucket in default_buckets(IMAGES, height=1024, width=1024)]
    assert sizes == [
        (720, 1440),
        (768, 1360),
        (832, 1248),
        (880, 1184),
        (1024, 1024),
        (1184, 880),
        (1248, 832),
        (1360, 768),
        (1440, 720),
    ]
    for height, width in sizes:
        nearest = min((1, 4 / 3, 3 / 2, 16 / 9, 2), key=lambda r: abs(abs(math.log(width / height)) - math.log(r)))
        assert abs(abs(math.log(width / height)) - math.log(nearest)) < 0.02


def test_each_size_has_each_number_of_frames() -> None:
    buckets = default_buckets(VIDEOS, height=480, width=832, frames=(1, 49))
    assert {bucket.frames for bucket in buckets} == {1, 49}
    sizes = [{(b.height, b.width) for b in buckets if b.frames == n} for n in (1, 49)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("grid", "sizes", "frames", "message"),
    [
        (IMAGES, [(1080, 1920)], 1, "height=1080 must be a multiple of 16: the nearest are 1072 and 1088"),
        (IMAGES, [(512, 500)], 1, "width=500 must be a multiple of 16: the nearest are 496 and 512"),
        (IMAGES, [(5, 512)], 1, "height=5 must be a multiple of 16: the nearest are 16"),
        (IMAGES, [(-512, 512)], 1, "height=-512 must be a multiple of 16: the nearest are 16"),
        (IMAGES, [(512.0, 512)], 1, "height=512.0 must be a whole number"),
        (IMAGES, [(512,)], 1, r"sizes must be pairs \[height, width\], got \[512\]"),
        (IMAGES, [], 1, "at least one size"),
        (IMAGES, [(512, 512)], (), "at least one size and one number of frames"),
        (IMAGES, [(512, 512)], 5, "frames=5 must be 1: this family trains on images"),
        (VIDEOS, [(512, 512)], 48, r"frames=48 must be 4·n \+ 1: the nearest are 45 and 49"),
        (VIDEOS, [(512, 512)], 0, r"frames=0 must be 4·n \+ 1: the nearest are 1$"),
        (VIDEOS, [(512, 512)], True, "frames=True must be a whole number"),
    ],
)
def test_sizes_off_the_grid_are_refused(grid: Grid, sizes: list[tuple[int, ...]], frames: int, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        explicit_buckets(grid, sizes=sizes, frames=frames)


def test_the_given_size_must_be_on_the_grid_too() -> None:
    with pytest.raises(FamilyError, match="the nearest are 1072 and 1088"):
        default_buckets(IMAGES, height=1080, width=1920)


def test_the_nearest_bucket() -> None:
    buckets = default_buckets(VIDEOS, height=480, width=832, frames=(1, 17, 49))
    for bucket in buckets:
        for scale in (0.8, 1.0, 3.0):
            height, width = round(bucket.height * scale), round(bucket.width * scale)
            assert nearest_bucket(buckets, bucket.frames, height, width) == bucket
    assert nearest_bucket(buckets, 48, 480, 832) == Bucket(17, 480, 832)
    assert nearest_bucket(buckets, 500, 832, 480) == Bucket(49, 832, 480)
    with pytest.raises(MediaError, match="has 12 frames, but the shortest bucket has 17"):
        nearest_bucket([Bucket(17, 64, 64)], 12, 64, 64)
    with pytest.raises(MediaError, match="has 1 frame, but"):
        nearest_bucket([Bucket(17, 64, 64)], 1, 64, 64)


def test_the_nearest_ratio_is_by_its_logarithm() -> None:
    flat, tall = Bucket(1, 100, 400), Bucket(1, 100, 100)
    assert nearest_bucket([flat, tall], 1, 200, 398) == tall  # 4 / 1.99 is more than 1.99 / 1, though 2.01 > 0.99
    assert nearest_bucket([flat, tall], 1, 200, 402) == flat  # though 4 - 2.01 > 2.01 - 1
    assert nearest_bucket([flat, tall], 1, 200, 100) == tall


def test_of_several_areas_the_largest_without_enlargement_is_taken() -> None:
    buckets = [Bucket(1, n, n) for n in (256, 512, 1024)]
    assert nearest_bucket(buckets, 1, 900, 900) == Bucket(1, 512, 512)
    assert nearest_bucket(buckets, 1, 2000, 2000) == Bucket(1, 1024, 1024)
    assert nearest_bucket(buckets, 1, 200, 200) == Bucket(1, 256, 256)
    assert nearest_bucket(buckets, 1, 20, 20) == Bucket(1, 256, 256)
    # a nearer ratio does not help if it needs too much enlargement
    assert nearest_bucket([Bucket(1, 720, 1280), Bucket(1, 480, 832)], 1, 450, 800) == Bucket(1, 480, 832)


def noise(frames: int, height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, frames, height, width), generator=torch.Generator().manual_seed(0)).byte()


@pytest.mark.parametrize(("height", "width", "top", "left"), [(32, 48, 0, 0), (41, 48, 4, 0), (32, 51, 0, 1)])
def test_pixels_are_exact_without_resizing(height: int, width: int, top: int, left: int) -> None:
    pixels = noise(6, height, width)
    fitted, crop = fit(pixels, Bucket(5, 32, 48))
    assert crop == Crop(top, left, 32, 48, 1.0)
    assert fitted.dtype == torch.float32
    assert fitted.is_contiguous()
    kept = pixels[:, :5, top : top + 32, left : left + 48].numpy()
    assert (fitted.numpy() == kept.astype(np.float32) / np.float32(127.5) - 1).all()
    assert torch.equal(((fitted + 1) * 127.5).round().byte(), torch.from_numpy(kept))


@pytest.mark.parametrize(("height", "width"), [(96, 200), (301, 97), (24, 40), (33, 49), (64, 96)])
def test_resizing_is_that_of_pillow_without_its_rounding(height: int, width: int) -> None:
    pixels = torch.nn.functional.interpolate(noise(2, 12, 20).float(), size=(height, width), mode="bilinear").byte()
    fitted, crop = fit(pixels, Bucket(2, 32, 48))
    assert fitted.shape == (3, 2, 32, 48)
    assert abs(crop.height / crop.width - 32 / 48) * min(crop.height, crop.width) <= 1  # to the nearest pixel
    assert height in (crop.height, height)
    assert crop.height == height or crop.width == width  # the largest part
    assert crop.top == (height - crop.height) // 2
    assert crop.left == (width - crop.width) // 2
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    for i in range(2):
        image = Image.fromarray(pixels[:, i].permute(1, 2, 0).numpy())
        expected = np.asarray(image.crop(box).resize((48, 32), Image.Resampling.BICUBIC)).astype(np.float32)
        ours = (fitted[:, i].permute(1, 2, 0).numpy() + 1) * 127.5
        assert np.abs(ours - expected).max() <= 1.6


def test_fine_patterns_become_grey() -> None:
    stripes = torch.zeros(3, 1, 160, 160, dtype=torch.uint8)
    stripes[..., ::2] = 255
    fitted, crop = fit(stripes, Bucket(1, 32, 32))
    assert crop.scale == 0.2
    assert fitted[..., 2:-2].abs().max() < 0.05


def test_values_stay_in_range_at_edges() -> None:
    edge = torch.zeros(3, 1, 50, 50, dtype=torch.uint8)
    edge[..., 25:] = 255
    fitted, _ = fit(edge, Bucket(1, 64, 64))
    assert fitted.min() == -1
    assert fitted.max() == 1


def test_small_media_are_refused_with_the_factor() -> None:
    with pytest.raises(
        MediaError, match=r"is too small: 40x30 pixels must be enlarged 1\.60 times for 64x48, but max_up"
    ):
        fit(noise(1, 30, 40), Bucket(1, 48, 64))
    _, crop = fit(noise(1, 30, 40), Bucket(1, 48, 64), max_upscale=1.6)
    assert crop == Crop(0, 0, 30, 40, 1.6)
    with pytest.raises(MediaError, match="has 2 frames, but the bucket has 5"):
        fit(noise(2, 48, 64), Bucket(5, 48, 64))
