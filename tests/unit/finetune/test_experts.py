"""Experts as one module: which one runs, validates and is averaged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.callbacks import EMACallback
from lightning_cp.families import ObjectiveDefaults
from lightning_cp.finetune import FineTuning, Validation
from lightning_cp.finetune.experts import Experts, experts_in, named_transformers
from lightning_cp.objectives import ExpertFlowMatching, FlowMatching
from lightning_cp.training.ranks import DataShard
from tests.dist.lightning_ranks import QUIET
from tests.unit.finetune.test_validation import Clips, Data, OneRank

RANGES = {"high": (0.7, 1.0), "low": (0.0, 0.7)}
SETTINGS: dict[str, Any] = {"seed": 2, "shift": 2.0}
QUANTILES = (0.9, 0.1, 0.4, 0.95)


class Scale(nn.Module):
    """Multiply the latents by a trained number, and record the times."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.times = nn.Parameter(torch.tensor(factor)), list[float]()

    @property
    def dtype(self) -> torch.dtype:
        return self.factor.dtype

    def forward(self, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        self.times += times.tolist()
        return self.factor * noisy


def scales() -> dict[str, nn.Module]:
    return {"high": Scale(0.3), "low": Scale(-0.4)}


def objective() -> ExpertFlowMatching:
    return ExpertFlowMatching(ranges=RANGES, **SETTINGS)


def family() -> Clips:
    built = Clips()
    built.objective = ObjectiveDefaults()  # type: ignore[misc]
    return built


def test_a_forward_runs_the_selected_expert() -> None:
    experts = Experts(scales())
    x, none = torch.ones(1), torch.zeros(1)
    for name, factor, idle in (("high", 0.3, "low."), ("low", -0.4, "high.")):
        experts.select(name)
        assert experts(x, none, none).item() == pytest.approx(factor)
        assert experts.idle == (idle,)
    assert experts_in(nn.Sequential(nn.ReLU(), experts)) is experts
    assert list(named_transformers(nn.Sequential(experts), "transformer")) == ["high", "low"]
    assert list(named_transformers(experts["low"], "transformer")) == ["transformer"]
    copied = copy.deepcopy(experts)
    copied["high"](x, none, none)
    assert copied.host.current == 0
    assert experts.host.current == 1, "a copy has hooks of its own"
    with pytest.raises(ValueError, match="'middle' is not one of the experts high, low"):
        experts.select("middle")
    with pytest.raises(ValueError, match=r"transformers=\['high'\] must be at least two"):
        Experts({"high": Scale(1.0)})


def test_objective_and_transformers_must_be_of_the_same_experts() -> None:
    assert FineTuning(scales(), family(), objective=objective()).expert == "high"
    for transformer, chosen in ((scales(), FlowMatching(seed=0)), (Scale(1.0), objective())):
        with pytest.raises(ValueError, match=r"the objective is for the experts .*, but the transformers are"):
            FineTuning(transformer, family(), objective=chosen)
    one = FineTuning(Scale(1.0), family())
    assert (one.expert, one.idle_weights) == (None, ())


def test_validation_evaluates_each_quantile_with_its_expert() -> None:
    experts, data = Experts(scales()), Data((4, 4, 2))
    experts.select("low")

    def losses(transformer: nn.Module, chosen: FlowMatching) -> dict[float, float]:
        validation = Validation(data, family(), chosen, quantiles=QUANTILES)
        return validation.losses(transformer, OneRank(), DataShard(0, 1)).by_quantile

    found = losses(experts, objective())
    assert experts.active == "low", "the next step selects its own, but it is the expert of the last step"
    for name, (low, high) in RANGES.items():
        times = experts[name].times
        assert len(times) == 6, "two quantiles and three samples for each expert"
        assert all(low < time <= high for time in times)
        alone = losses(copy.deepcopy(experts[name]), FlowMatching(**SETTINGS))  # at the same times
        for p in QUANTILES:
            if objective().expert_of(p)[0] == name:
                assert found[p] == pytest.approx(alone[p], rel=1e-6)

    with pytest.raises(ValueError, match="the objective is for the experts high, low, but Scale has none"):
        losses(Scale(1.0), objective())


class Averages(Callback):
    """The averages after each step."""

    def __init__(self, average: EMACallback) -> None:
        self.average, self.rows = average, list[tuple[str | None, dict[str, float]]]()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        values = {name.split(".")[1]: float(x) for name, x in self.average.state_dict().items()}
        self.rows.append((pl_module.expert, values))
        assert f"loss_{pl_module.expert}" in trainer.callback_metrics


@pytest.mark.filterwarnings("ignore")
def test_with_the_trainer_only_the_trained_expert_is_averaged() -> None:
    data = Data((4,) * 12)
    loader: Any = DataLoader(data, batch_size=2, collate_fn=data.collate)  # type: ignore[arg-type]
    average = EMACallback(0.5)
    averages = Averages(average)
    module = FineTuning(scales(), family(), objective=objective())
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=6, callbacks=[average, averages], **QUIET)
    trainer.fit(module, loader)
    assert [name for name, _ in averages.rows] == [objective().expert_at(step) for step in range(6)]
    assert {name for name, _ in averages.rows} == {*RANGES}
    joined = Trainer(accelerator="cpu", devices=1, max_steps=2, accumulate_grad_batches=2, **QUIET)
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=2\) would join batches of different experts"):
        joined.fit(FineTuning(scales(), family(), objective=objective()), loader)
    for (_, before), (name, after) in zip(averages.rows, averages.rows[1:], strict=False):
        assert [key for key in RANGES if before[key] != after[key]] == [name]
