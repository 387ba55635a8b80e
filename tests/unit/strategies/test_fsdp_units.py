"""Which modules FSDP2 shards."""

from __future__ import annotations

from torch import nn
from torchmetrics import MeanMetric

from lightning_cp.strategies.fsdp_units import find_fsdp_units, frozen_children


class _Metrics(nn.Module):
    """A layer, metrics and a list of blocks, as children of a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(2, 2), MeanMetric()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_metrics_of_torchmetrics_hide_no_child_that_trains() -> None:
    module = _Metrics()
    frozen = frozen_children(module, [])
    assert {*frozen} == {module.mean, module.frozen}
    assert find_fsdp_units(module, [], frozen, by_child=True) == [*module.blocks, module.layer]
