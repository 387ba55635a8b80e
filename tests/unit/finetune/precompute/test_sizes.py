"""The sizes that media are encoded at, for every family."""

from __future__ import annotations

import pytest

from lightning_cp.errors import FamilyError
from lightning_cp.families import family_for
from lightning_cp.media import Bucket
from lightning_cp.precompute import buckets_of, default_size
from tests.families.cases import CASES, made

pytestmark = pytest.mark.filterwarnings("ignore")
EXPECTED = {  # what the tiny pipeline samples without a size: its own defaults, or its config's
    "flux": (1, 256, 256),
    "flux2": (1, 1024, 1024),
    "krea2": (1, 1024, 1024),
    "wan": (81, 480, 832),
    "cogvideox": (9, 48, 80),
    "ltx": (161, 512, 704),
    "ltx2": (121, 512, 768),
    "ltx2_image": (121, 512, 768),
    "sd3": (1, 32, 32),
    "qwen_image": (1, 512, 512),
    "z_image": (1, 1024, 1024),
    "sana": (1, 1024, 1024),
    "pixart_sigma": (1, 64, 64),
    "hunyuan_video": (129, 720, 1280),
    "hunyuan_video15": (121, 12, 20),
    "hunyuan_video15_image_to_video": (121, 12, 20),
}


@pytest.mark.parametrize("case", dict.fromkeys((*EXPECTED, *list(CASES)[::4])))
def test_default_sizes_are_taken_by_the_family(case: str) -> None:
    pipe = made(case)
    family = family_for(pipe)
    default = default_size(pipe, family)
    if case in EXPECTED:
        assert default == Bucket(*EXPECTED[case])
    buckets = buckets_of(pipe, family, sizes=None, frames=None, kinds=("video",))
    assert default in buckets
    for bucket in buckets:
        family.check_size(height=bucket.height, width=bucket.width, frames=bucket.frames)
        assert bucket.height * bucket.width <= default.height * default.width


def test_frames_follow_the_kinds_of_files() -> None:
    pipe = made("wan")
    family = family_for(pipe)
    for kinds, frames in ((["video"], {81}), (["image"], {1}), (["image", "video"], {1, 81})):
        assert {bucket.frames for bucket in buckets_of(pipe, family, sizes=None, frames=None, kinds=kinds)} == frames
    assert {x.frames for x in buckets_of(pipe, family, sizes=None, frames=[5, 17])} == {5, 17}


def test_sizes_that_the_model_refuses_are_left_out_or_named() -> None:
    pipe = made("cogvideox_image")  # its learned positions have one size
    family = family_for(pipe)
    assert {(x.height, x.width) for x in buckets_of(pipe, family, sizes=None, frames=None)} == {(48, 80)}
    with pytest.raises(FamilyError, match="64"):
        buckets_of(pipe, family, sizes=[[48, 80], [64, 64]], frames=None)


def test_sizes_off_the_grid_are_refused() -> None:
    pipe = made("wan")
    family = family_for(pipe)
    with pytest.raises(FamilyError, match=r"height=50 must be a multiple of 16: the nearest are 48 and 64"):
        buckets_of(pipe, family, sizes=[[50, 64]], frames=5)
    with pytest.raises(FamilyError, match=r"frames=6 must be 4·n \+ 1: the nearest are 5 and 9"):
        buckets_of(pipe, family, sizes=[[48, 64]], frames=6)
    with pytest.raises(FamilyError, match=r"frames=5 must be 1: this family trains on images"):
        buckets_of(made("flux"), family_for(made("flux")), sizes=[[16, 16]], frames=5)


def test_pictures_alone_are_refused_by_a_model_that_needs_clips() -> None:
    pipe = made("wan_image_time_per_token")
    with pytest.raises(FamilyError, match="clips must have more than one latent frame"):
        buckets_of(pipe, family_for(pipe), sizes=None, frames=None, kinds=["image"])
