"""Sums, gathered tensors, metrics and throughput: each sample counts once, not once for each rank that shares it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ThroughputMonitor
from torch import Tensor
from torch.utils.data import DataLoader

from tests.dist.lightning_ranks import BY_PLAN, STRATEGIES, everyones, fabric_of, trainer_of
from tests.dist.plain import Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLES = 12


class Counts(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Plain()
        self.sum, self.cat = torchmetrics.SumMetric(), torchmetrics.CatMetric()
        self.gathered: Tensor | None = None

    def validation_step(self, batch: Tensor, index: int) -> None:
        count = float(len(batch))
        settings: dict[str, Any] = {"sync_dist": True, "batch_size": len(batch)}
        self.log("count", count, reduce_fx="sum", **settings)
        self.log("integers", torch.tensor(len(batch)), reduce_fx="sum", **settings)
        self.log("mean", batch.mean(), **settings)
        self.log("largest", batch.max(), reduce_fx="max", **settings)
        self.sum.update(count)
        self.cat.update(batch[:, 0, 0])
        self.log("metric", self.sum)
        self.gathered = self.all_gather(batch[:, 0, 0])

    def on_validation_epoch_end(self) -> None:
        self.log("gathered", float(self.cat.compute().unique().numel()))
        self.log("entries", float(self.cat.compute().numel()))


def data() -> Tensor:
    return torch.arange(SAMPLES).view(-1, 1, 1).expand(-1, 5, 16).float()


def _of_trainer(rank: int, world: int, kind: str, ring: int) -> tuple[dict[str, float], list[list[int]], float]:
    strategy = STRATEGIES["trainer", kind](ring=ring, **BY_PLAN)
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=2)
    trainer = trainer_of(rank, world, strategy, callbacks=[monitor])
    module = Counts()
    trainer.validate(module, DataLoader(data(), batch_size=2), verbose=False)
    assert module.gathered is not None
    per_rank = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert all(other == per_rank for other in everyones(per_rank))
    (throughput,) = monitor._throughputs.values()
    only_one = [bool(trainer.strategy.reduce_boolean_decision(rank == 1, all=every)) for every in (True, False)]
    assert only_one == [False, True]
    assert trainer.strategy.reduce_boolean_decision(True)
    return per_rank, module.gathered.tolist(), float(throughput.world_size)


@pytest.mark.parametrize(("world", "ring", "kind"), [(3, 3, "cp"), (4, 2, "cp_fsdp"), (2, 1, "cp")])
@pytest.mark.default(1)
def test_the_trainers_sums_and_metrics_count_samples(run_ranks: RankPool, world: int, ring: int, kind: str) -> None:
    groups = world // ring
    for logged, gathered, multiplier in run_ranks(world, _of_trainer, kind, ring):
        assert logged == {
            "count": SAMPLES,
            "integers": SAMPLES,
            "mean": (SAMPLES - 1) / 2,
            "largest": SAMPLES - 1,
            "metric": SAMPLES,
            "gathered": SAMPLES,
            "entries": SAMPLES,
        }
        last = [sorted(row) for row in gathered]
        assert last == [[10, 11]] if groups == 1 else last == [[8, 10], [9, 11]]
        assert multiplier == groups


def _of_fabric(rank: int, world: int, ring: int) -> dict[str, Any]:
    fabric = fabric_of(rank, world, STRATEGIES["fabric", "cp"](ring=ring, **BY_PLAN))
    group = fabric.strategy.data_rank
    metric = torchmetrics.SumMetric()
    metric.update(1.0 + group)
    x = torch.full((2,), 1.0 + group, requires_grad=True)
    weights = torch.arange(1.0, 1 + fabric.strategy.data_size)[:, None]
    (fabric.all_gather(x, sync_grads=True) * weights).sum().backward()
    every = fabric.all_reduce(torch.tensor(1), group=dist.new_group(list(range(world))), reduce_op="sum")
    found = {
        "metric": metric.compute().item(),
        "sum": fabric.all_reduce(torch.tensor(1.0 + group), reduce_op="sum").item(),
        "integer": fabric.all_reduce(torch.tensor(1 + group), reduce_op="sum").item(),
        "boolean": fabric.all_reduce(torch.tensor(group == 0), reduce_op="sum").item(),
        "mean": fabric.all_reduce(torch.tensor(1.0 + group)).item(),
        "least": fabric.all_reduce(torch.tensor(1.0 + group), reduce_op=dist.ReduceOp.MIN).item(),
        "nested": fabric.all_gather({"x": torch.tensor(float(group))})["x"].tolist(),
        "ranks": every.item(),
        "gradient": None if x.grad is None else (x.grad / world).sum().item(),
    }
    leaf = torch.full((2,), 1.0 + group, requires_grad=True)
    loss = (3 * leaf).sum()
    fabric.all_reduce(loss, reduce_op="sum")  # in place, and before the backward
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    with torch.inference_mode():
        inferred = torch.tensor(1.0 + group)
    found |= {
        "summed loss": loss.item(),
        "gradient of a summed loss": leaf.grad.tolist(),
        "leaf": fabric.all_reduce(leaf, reduce_op="sum").tolist(),
        "inference": fabric.all_reduce(inferred, reduce_op="sum").item(),
    }
    with pytest.raises(ValueError, match="count each sample 2 times"):
        fabric.all_reduce(torch.tensor(1), reduce_op="product")
    with pytest.raises(ValueError, match="they differ"):
        fabric.all_reduce(torch.tensor(int(rank == 1)), reduce_op="sum")
    return found


def test_fabrics_reductions_and_free_metrics_count_samples(run_ranks: RankPool) -> None:
    expected = {
        "metric": 3,
        "sum": 3,
        "integer": 3,
        "boolean": True,
        "mean": 1.5,
        "least": 1,
        "nested": [0, 1],
        "ranks": 4,
    }
    expected |= {"summed loss": 18, "gradient of a summed loss": [3, 3], "leaf": [3, 3], "inference": 3}
    found = run_ranks(4, _of_fabric, 2)
    for one in found:
        assert {name: one[name] for name in expected} == expected
    # Averaged over all ranks, as weights' gradients are: each group's entry has its weight once (two numbers each).
    assert [one["gradient"] for one in found] == [2.0, 0.0, 4.0, 0.0]
