import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sklearn.svm  # noqa: F401  (sets environment variables, which a test must not)
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_cp.recipes.digits.data import load_scans
from lightning_cp.recipes.digits.recognise import recognise_digits
from lightning_cp.recipes.sampling.show import draw_grid
from lightning_cp.sampling import SamplingSettings, draw_samples, integrate_flow
from lightning_cp.training.ranks import DataShard


def exact_velocity(target: Tensor):  # type: ignore[no-untyped-def]
    def velocity(x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        shift = torch.where(labels == 9, 0.0, 1.0).view(-1, 1)  # the condition moves the target by one
        return (x - target - shift) / times.view(-1, 1)

    return velocity


@pytest.mark.parametrize("guidance", [0.0, 1.0, 3.0])
def test_a_straight_flow_ends_at_its_target_and_guidance_extrapolates(guidance: float) -> None:
    noise = torch.randn(4, 3)
    end = integrate_flow(
        exact_velocity(torch.tensor(2.0)), noise, torch.zeros(4, dtype=torch.long), null_label=9, guidance=guidance
    )
    assert torch.allclose(end, torch.full((4, 3), 2.0 + guidance), atol=0.2)


def test_the_model_is_called_twice_a_step_on_a_doubled_batch_without_gradients() -> None:
    sizes = []

    def velocity(x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        sizes.append(len(x))
        return x * 0

    integrate_flow(velocity, torch.randn(5, 2), torch.zeros(5, dtype=torch.long), null_label=1, num_steps=4)
    assert sizes == [10] * 8


def test_real_scans_are_recognised_and_noise_is_not() -> None:
    scans = load_scans()
    seen = recognise_digits(scans.pixels[:200, None, None], scans.labels[:200])
    assert seen.fraction > 0.99
    noise = recognise_digits(torch.randn(200, 1, 1, 8, 8), scans.labels[:200])
    assert noise.fraction < 0.4


def test_a_digit_anywhere_on_a_canvas_is_recognised() -> None:
    scans = load_scans()
    clips = torch.full((50, 1, 3, 24, 24), -1.0)
    for i in range(50):
        clips[i, 0, 1, i % 16 : i % 16 + 8, 5:13] = scans.pixels[i]
    assert recognise_digits(clips, scans.labels[:50]).fraction > 0.8


@pytest.mark.parametrize("frames", [1, 4])
@pytest.mark.default(1)
def test_samples_that_are_not_finite_have_no_prediction(frames: int, tmp_path: Path) -> None:
    scans = load_scans()
    pixels = scans.pixels[:20, None, None].expand(-1, -1, frames, -1, -1).clone()
    whole = recognise_digits(pixels, scans.labels[:20])
    pixels[3, 0, frames // 2, 4, 4] = float("nan")
    pixels[7, 0, 0, 0, 0] = float("inf")
    some = recognise_digits(pixels, scans.labels[:20])
    lost = torch.tensor([3, 7])
    assert some.predicted[lost].tolist() == [-1, -1]
    rest = torch.tensor([i for i in range(20) if i not in (3, 7)])
    assert torch.equal(some.predicted[rest], whole.predicted[rest])
    assert some.fraction == pytest.approx(whole.fraction - 0.1)
    none = recognise_digits(torch.full_like(pixels, float("nan")), scans.labels[:20])
    assert (none.fraction, set(none.predicted.tolist())) == (0.0, {-1})
    draw_grid(pixels, scans.labels[:20], some.predicted, tmp_path / "grid.png", title="a title")


@pytest.mark.parametrize("frames", [1, 4])
@pytest.mark.default(1)
def test_the_grid_is_a_png(frames: int, tmp_path: Path) -> None:
    samples, labels = torch.randn(23, 1, frames, 8, 8), torch.arange(23) % 10
    draw_grid(samples, labels, labels.roll(1), tmp_path / "grid.png", title="a title")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_three_channels_are_drawn_in_colour_and_without_a_prediction(tmp_path: Path) -> None:
    from matplotlib.image import imread

    samples = torch.full((3, 3, 1, 8, 8), -1.0)
    samples[torch.arange(3), torch.arange(3)] = 1.0  # red, green, blue
    draw_grid(samples, torch.arange(3), None, tmp_path / "grid.png", title="a title")
    drawn = torch.from_numpy(imread(tmp_path / "grid.png"))[..., :3].flatten(0, 1)
    for colour in torch.eye(3):
        assert (drawn == colour).all(-1).sum() > 100


class FakeWorld:
    """Ranks of a fabric as threads: each gathers the tensors of one rank of each data group."""

    def __init__(self, data_ranks: list[int]) -> None:
        self.data_ranks = data_ranks
        self.barrier = threading.Barrier(len(data_ranks), timeout=60)
        self.given: list[Tensor] = [torch.empty(0)] * len(data_ranks)

    def draw(self, count: int) -> list[Tensor]:
        with ThreadPoolExecutor(len(self.data_ranks)) as pool:
            return list(pool.map(lambda rank: self._draw(rank, count), range(len(self.data_ranks))))

    def _draw(self, rank: int, count: int) -> Tensor:
        def all_gather(x: Tensor) -> Tensor:
            self.given[rank] = x
            self.barrier.wait()
            groups = range(max(self.data_ranks) + 1)
            return torch.stack([self.given[self.data_ranks.index(data_rank)] for data_rank in groups])

        data_shard = DataShard(self.data_ranks[rank], max(self.data_ranks) + 1)
        fabric: Any = SimpleNamespace(device=torch.device("cpu"), all_gather=all_gather)
        settings = SamplingSettings(count, 3, 2.0, seed=0)
        return draw_samples(
            fabric, ScaledNoise(), (1, 1, 2, 2), settings=settings, num_classes=10, data_shard=data_shard
        ).pixels


class ScaledNoise(torch.nn.Module):
    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        return x * 0.1 * labels.view(-1, 1, 1, 1, 1)


@pytest.mark.parametrize("data_ranks", [[0, 0], [0, 1], [0, 1, 2], [0, 1, 0, 1]])
@pytest.mark.parametrize("count", [7, 12])
def test_samples_do_not_depend_on_the_number_of_data_ranks(data_ranks: list[int], count: int) -> None:
    expected = draw_samples(
        Fabric(accelerator="cpu", devices=1),
        ScaledNoise(),
        (1, 1, 2, 2),
        settings=SamplingSettings(count, 3, 2.0, seed=0),
        num_classes=10,
        data_shard=DataShard(0, 1),
    )
    assert expected.labels.tolist() == [i % 10 for i in range(count)]
    for pixels in FakeWorld(data_ranks).draw(count):
        assert torch.equal(pixels, expected.pixels)
