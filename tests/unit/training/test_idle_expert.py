"""The recipe's loop around two experts: a step changes nothing of the idle one, and reports the active one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_cp.finetune.experts import Experts
from tests.unit.training.test_finite import Loop


def test_a_step_changes_only_the_active_expert(tmp_path: Path) -> None:
    experts = Experts({"high": nn.Linear(3, 1), "low": nn.Linear(3, 1)})
    loop = Loop(tmp_path, module=experts)

    def values() -> dict[str, list[Tensor]]:
        """Weights, averages and optimizer states by name."""
        return {name: [x.detach().clone() for x in found] for name, found in loop.state.named_tensors()}

    for name in ("low", "low", "high", "low", "high", "high"):
        before = values()
        experts.select(name)
        loop.step()
        changed = {
            key
            for key, found in values().items()
            if len(found) != len(before[key]) or not all(map(torch.equal, found, before[key]))
        }
        assert changed == {key for key in before if f"{name}." in key}, "weight, average and optimizer state"
    assert [report.expert for report in loop.reports] == [2.0, 2.0, 1.0, 2.0, 1.0, 1.0]
