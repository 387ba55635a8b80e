import pytest
import torch

from lightning_cp.data import RandomStream
from lightning_cp.objectives import FlowMatching
from lightning_cp.recipes.digits.family import LabelledClips
from lightning_cp.training import sample_dropped, sample_noise, sample_times, sample_uniform


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_rows_do_not_depend_on_how_the_batch_is_divided(parts: int) -> None:
    rows = 8 // parts
    key = {"seed": 3, "step": 11}
    noise = [sample_noise((rows, 2, 5), **key, first_index=part * rows) for part in range(parts)]
    times = [sample_times(rows, **key, first_index=part * rows) for part in range(parts)]
    dropped = [sample_dropped(rows, 0.5, **key, first_index=part * rows) for part in range(parts)]
    assert torch.equal(torch.cat(noise), sample_noise((8, 2, 5), **key))
    assert torch.equal(torch.cat(times), sample_times(8, **key))
    assert torch.equal(torch.cat(dropped), sample_dropped(8, 0.5, **key))


def test_noise_does_not_touch_or_follow_the_global_generators() -> None:
    torch.manual_seed(0)
    first, state = sample_noise((2, 3), seed=0, step=0), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, sample_noise((2, 3), seed=0, step=0))
    torch.set_rng_state(state)


def test_noise_is_standard_normal_and_differs_by_seed_step_row_and_stream() -> None:
    noise = sample_noise((64, 1000), seed=0, step=0)
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert abs(torch.corrcoef(noise)[~torch.eye(64, dtype=torch.bool)]).max() < 0.2
    others = [
        sample_noise((64, 1000), seed=1, step=0),
        sample_noise((64, 1000), seed=0, step=1),
        sample_noise((64, 1000), seed=0, step=0, first_index=1),
        sample_noise((64, 1000), seed=0, step=0, stream=RandomStream.SAMPLE),
    ]
    assert all(not torch.equal(noise, other) for other in others)


def test_dtype_and_extremes() -> None:
    assert sample_noise((2, 3), seed=0, step=0, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert sample_noise((0, 3), seed=0, step=0).shape == (0, 3)
    assert not sample_dropped(50, 0.0, seed=0, step=0).any()
    assert sample_dropped(50, 1.0, seed=0, step=0).all()
    times = sample_times(5000, seed=0, step=0)
    assert ((times > 0) & (times < 1)).all()
    assert abs(times.mean() - 0.5) < 0.02
    uniform = sample_uniform(5000, seed=0, step=0, stream=1000)
    assert abs(uniform.mean() - 0.5) < 0.02


def test_a_flow_batch_is_the_point_on_the_line_and_its_velocity() -> None:
    family, flow = LabelledClips({"num_classes": 10}), FlowMatching(seed=0, cond_dropout=0.5)
    pixels, labels = torch.randn(16, 1, 1, 4, 4), torch.arange(16) % 10
    batch = flow.noised(family, family.batch(pixels, labels), step=2)
    times = batch.times.view(-1, 1, 1, 1, 1)
    assert torch.allclose(batch.noisy - times * batch.target, pixels, atol=1e-5)
    dropped = batch.stored["labels"] == 10
    assert torch.equal(dropped, sample_dropped(16, 0.5, seed=0, step=2))
    assert torch.equal(batch.stored["labels"][~dropped], labels[~dropped])
    part = flow.noised(family, family.batch(pixels[8:], labels[8:]), step=2, first_index=8)
    assert torch.equal(part.noisy, batch.noisy[8:])
