import pytest
import sklearn.svm  # noqa: F401  (sets environment variables, which a test must not)
import torch

from lightning_cp.recipes.digits.data import Digits, MovingDigits, load_scans
from lightning_cp.recipes.digits.recognise import inkiest_windows


def test_digits_are_all_the_scans_in_range() -> None:
    digits = Digits()
    pixels, label = digits[7]
    assert len(digits) == 1797
    assert pixels.shape == Digits.sample_shape == (1, 1, 8, 8)
    assert label == int(load_scans().labels[7])
    assert (load_scans().pixels.amin(), load_scans().pixels.amax()) == (-1, 1)


def test_every_frame_of_a_clip_shows_its_scan_whole() -> None:
    clips = MovingDigits(12, 20, 32)
    for index in (0, 5, 1796):
        clip, label = clips[index]
        assert clip.shape == clips.sample_shape == (1, 12, 20, 32)
        assert label == int(load_scans().labels[index])
        ink = (clip[0] + 1).sum(dim=(1, 2))
        assert torch.allclose(ink, (load_scans().pixels[index] + 1).sum().expand(12))
        corners = clips._path(index)
        assert (corners >= 0).all()
        assert (corners <= [12, 24]).all()
        assert abs(corners[1:] - corners[:-1]).max() <= clips.max_speed


def test_clips_depend_on_seed_and_index_alone_and_most_move() -> None:
    clips = MovingDigits(4, 32, 32, seed=1)
    assert torch.equal(clips[3][0], MovingDigits(4, 32, 32, seed=1)[3][0])
    assert not torch.equal(clips[3][0], MovingDigits(4, 32, 32, seed=2)[3][0])
    moving = [not torch.equal(clip[0, 0], clip[0, -1]) for clip, _ in (clips[i] for i in range(20))]
    assert sum(moving) >= 15


def test_a_canvas_of_one_digit_leaves_no_room_to_move() -> None:
    clip, _ = MovingDigits(3, 8, 8)[2]
    assert torch.equal(clip[0, 0], clip[0, 2])


def test_the_inkiest_window_finds_the_digit() -> None:
    frames = torch.full((1, 20, 20), -1.0)
    frames[0, 5:13, 9:17] = torch.linspace(0.1, 1, 64).view(8, 8)
    assert torch.equal(inkiest_windows(frames)[0], frames[0, 5:13, 9:17])


@pytest.mark.parametrize("size", [(0, 16, 16), (4, 7, 16), (4, 16, 7)])
def test_a_canvas_too_small_is_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"frames={size[0]}, height={size[1]}, width={size[2]}"):
        MovingDigits(*size)
