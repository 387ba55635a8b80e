"""The EMA of weights that are unfrozen, frozen or removed while it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_cp.training.ema import WeightAverage


def _two(*, trained: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).requires_grad_(trained))


def test_the_average_of_an_unfrozen_weight_starts_before_its_first_step() -> None:
    module, reference = _two(trained=False), _two(trained=True)
    average, expected = WeightAverage(module, 0.9), WeightAverage(reference, 0.9)
    for step in (1, 2, 3):
        if step == 2:
            module[1].requires_grad_(requires_grad=True)
        if step == 3:
            module[1].requires_grad_(requires_grad=False)  # its average follows the last value
        average.add_trained(module)
        with torch.no_grad():
            for one in (module, reference):
                one[0].weight.add_(step)
                one[1].weight.add_(step if step == 2 else 0)
        average.update(module, step=step)
        expected.update(reference, step=step)
    found = average.state_dict()
    assert found.keys() == expected.state_dict().keys()
    assert all(torch.allclose(found[name], x) for name, x in expected.state_dict().items())


def test_a_removed_weight_is_an_error() -> None:
    module = _two(trained=True)
    average = WeightAverage(module)
    del module[1]
    with pytest.raises(ValueError, match=r"1\.weight has an EMA and is no longer a weight of Sequential"):
        average.update(module, step=1)
