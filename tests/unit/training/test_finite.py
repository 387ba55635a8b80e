"""Treatment and names of losses and gradients that are not finite."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lightning_cp.checkpoint import latest_checkpoint
from lightning_cp.checkpoint.store import CheckpointWriter
from lightning_cp.data import GlobalBatchSampler
from lightning_cp.errors import NonFiniteError
from lightning_cp.launch.channel import Stopped, StopRequest
from lightning_cp.recipes.training.loop import Schedule, StepReport, Steps, StepTrace
from lightning_cp.recipes.training.run import Run
from lightning_cp.recipes.training.state import TrainState
from lightning_cp.training import WeightAverage
from lightning_cp.training.finite import MOST_SKIPPED_IN_A_ROW, StepGuard, find_nonfinite
from lightning_cp.training.ranks import DataShard

NAN, INF = math.nan, math.inf
SINGLE_RANK: Any = SimpleNamespace(
    device=torch.device("cpu"),
    global_rank=0,
    is_global_zero=True,
    all_reduce=lambda x, reduce_op: x,
    barrier=lambda: None,
)


class Loop:
    """The recipe's loop around a linear model or `module`, without Lightning."""

    def __init__(
        self,
        folder: Path,
        *,
        module: nn.Module | None = None,
        on_nonfinite: str = "error",
        scaler: GradScaler | None = None,
        checkpoint_every: int = 2,
        schedule: Schedule = Schedule(),  # noqa: B008 - frozen
        rates: tuple[float, float] = (0.1, 0.1),
    ) -> None:
        torch.manual_seed(0)
        self.module: Any = module or nn.Linear(3, 1)
        self.request, self.scaler = StopRequest(), scaler
        groups = [{"params": [x], "lr": lr} for x, lr in zip(self.module.parameters(), cycle(rates), strict=False)]
        self.optimizer = torch.optim.AdamW(groups)
        average, sampler = WeightAverage(self.module, 0.9), GlobalBatchSampler(16, 4)
        self.state = TrainState(self.module, self.module, self.optimizer, average, sampler, 0)
        tuning: Any = None  # only for validation and export
        run = Run(SINGLE_RANK, self.state, tuning, folder, DataShard(0, 1), self.request)
        self.reports: list[StepReport] = []
        watcher: Any = SimpleNamespace(watch=self.reports.append)
        self.steps = Steps(
            run,
            OmegaConf.create({"max_steps": 1000, "checkpoint_every": checkpoint_every}),
            CheckpointWriter(folder / "checkpoints", keep=2),
            schedule=schedule,
            tokens=64,
            trace=StepTrace(None, folder),
            guard=StepGuard(on_nonfinite, scaler),
            watchers=[watcher],
        )

    def step(self, factor: float = 1.0) -> None:
        self.steps.begin()
        loss = self.steps.add(self._loss(self.module, factor), torch.zeros(()))
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
        self.steps.before_update(max_norm=1.0)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.steps.end()

    @staticmethod
    def _loss(model: nn.Module, factor: float) -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(4, 3)).square().mean() * factor
        return loss

    @property
    def values(self) -> torch.Tensor:
        tensors = [x.detach() for _, found in self.state.named_tensors() for x in found]
        return torch.cat([x.flatten().clone() for x in tensors])


def test_each_parameter_group_keeps_its_own_rate(tmp_path: Path) -> None:
    schedule = Schedule("cosine", 2, 6)
    loop = Loop(tmp_path, schedule=schedule, rates=(0.1, 1.6))
    factors = [schedule.factor(step) for step in range(1, 7)]
    found = []
    for _ in factors:
        loop.step()
        found.append([group["lr"] for group in loop.optimizer.param_groups])
    assert found == [pytest.approx([0.1 * factor, 1.6 * factor]) for factor in factors]
    assert [report.lr for report in loop.reports] == pytest.approx([0.1 * factor for factor in factors])


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in range(5):
        loop.step()
    before = loop.values
    with pytest.raises(NonFiniteError, match=r"step 6: the loss is nan\. .*step_00000004: use a lower optim\.lr"):
        loop.step(NAN)
    assert torch.equal(loop.values, before)
    assert (loop.reports[-1].step, len(loop.reports)) == (6, 6)


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.module.bias.register_hook(lambda grad: grad * INF)
    with pytest.raises(NonFiniteError, match=r"step 1: the norm of the gradient is inf, of bias\. This run has no"):
        loop.step()


def test_a_norm_that_overflows_is_reported_differently_from_an_infinite_gradient(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(NonFiniteError, match="norm of the gradient is inf, because finite gradients are too large"):
        loop.step(1e30)


def test_a_skipped_step_changes_nothing_but_the_count_and_goes_into_checkpoints(tmp_path: Path) -> None:
    loop = Loop(tmp_path, on_nonfinite="skip")
    loop.step()
    before = loop.values
    loop.step(NAN)
    assert torch.equal(loop.values, before)
    loop.step()
    loop.step(INF)
    assert not torch.equal(loop.values, before)
    assert [report.skipped for report in loop.reports] == [0, 1, 1, 2]
    assert [math.isfinite(report.loss) for report in loop.reports] == [True, False, True, False]
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    other = Loop(tmp_path / "other")
    other.state.load(newest)
    assert (other.state.step, other.state.skipped) == (4, 2)


def test_a_checkpoint_before_the_first_update_changes_nothing(tmp_path: Path) -> None:
    often, never = (Loop(tmp_path / str(n), on_nonfinite="skip", checkpoint_every=n) for n in (1, 99))
    for factor in (NAN, 1.0, 1.0):
        often.step(factor)
        never.step(factor)
    assert torch.equal(often.values, never.values)


def test_skipping_for_ever_is_an_error(tmp_path: Path) -> None:
    loop = Loop(tmp_path, on_nonfinite="skip")
    loop.step()
    for _ in range(MOST_SKIPPED_IN_A_ROW):
        loop.step(NAN)
    with pytest.raises(NonFiniteError, match=rf"the loss is nan, and {MOST_SKIPPED_IN_A_ROW} steps were skipped"):
        loop.step(NAN)


def test_ignored_is_as_before_but_weights_that_are_not_finite_are_never_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(tmp_path, on_nonfinite="ignore")
    for _ in range(2):
        loop.step()
    for _ in range(4):
        loop.step(NAN)
    assert loop.values.isnan().any()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000002"]
    assert capsys.readouterr().err.count("weights are not finite and are not saved: weight, the average of") == 2
    loop.request.number = 15
    with pytest.raises(Stopped, match="after step 7, without a checkpoint: weights are not finite"):
        loop.step()


@pytest.mark.parametrize("spoilt", ["weight", "the average of weight", "the optimizer state of bias"])
def test_what_is_saved_is_looked_at_whole(spoilt: str, tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in range(3):
        loop.step()
    tensors = dict(loop.state.named_tensors())[spoilt]
    end = loop.steps.end

    def spoil_and_end() -> None:
        with torch.no_grad():
            tensors[-1].view(-1)[0] = INF
        end()

    loop.steps.end = spoil_and_end  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match=rf"after step 4 weights are not finite .*: {spoilt}.*step_00000002"):
        loop.step()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000002"]


@pytest.mark.parametrize("on_nonfinite", ["error", "skip"])
def test_a_scaler_that_looks_for_its_scale_is_no_error_but_a_gradient_without_scale_is(
    on_nonfinite: str, tmp_path: Path
) -> None:
    loop = Loop(tmp_path, on_nonfinite=on_nonfinite, scaler=GradScaler("cpu", init_scale=2.0**4), checkpoint_every=99)
    fails = {"on": True}
    loop.module.weight.register_hook(lambda grad: grad * (INF if fails["on"] else 1))
    before = loop.values
    for _ in range(3):
        loop.step()
    assert torch.equal(loop.values, before)
    assert (loop.state.skipped, loop.scaler and loop.scaler.get_scale()) == (3, 2.0)
    fails["on"] = False
    loop.step()
    assert not torch.equal(loop.module.weight.detach().flatten(), before[:3])
    fails["on"] = True
    loop.step()
    loop.step()  # at a scale of 2, then 1
    if on_nonfinite == "error":
        with pytest.raises(NonFiniteError, match="norm of the gradient is"):
            loop.step()


def test_tensors_that_are_not_finite_are_found_by_name() -> None:
    named = [
        ("a", [torch.ones(2)]),
        ("b", []),
        ("c", [torch.ones(2), torch.tensor([1.0, NAN])]),
        ("d", [-INF * torch.ones(1)]),
    ]
    assert find_nonfinite(named, SINGLE_RANK) == ["c", "d"]
    assert find_nonfinite([], SINGLE_RANK) == []
    assert find_nonfinite([("steps", [torch.ones(2, dtype=torch.long)])], SINGLE_RANK) == []
