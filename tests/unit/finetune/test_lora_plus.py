"""LoRA+: the learning rates of both matrices of adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cp.families import family_for
from lightning_cp.finetune import FineTuning, LoraSettings, add_lora
from tests.families.cases import made
from tests.models import TINY


def tuning(*, adapters: bool = True, **settings: Any) -> FineTuning:
    transformer: Any = TINY["wan"].build()
    if adapters:
        add_lora(transformer, LoraSettings(rank=2))
    return FineTuning(transformer, family_for(made("wan")), **settings)


@pytest.mark.parametrize(("optimizer", "lr"), [(None, 1e-4), (lambda x: torch.optim.SGD(x, lr=0.5), 0.5)])
def test_second_matrices_get_the_ratio_times_the_rate(optimizer: Any, lr: float) -> None:
    module = tuning(optimizer=optimizer, lora_lr_ratio=16)
    names = {x: name for name, x in module.named_parameters()}
    first, second = module.configure_optimizers().param_groups
    assert (first["lr"], second["lr"]) == (lr, 16 * lr)
    assert all(".lora_A." in names[x] for x in first["params"])
    assert all(".lora_B." in names[x] for x in second["params"])
    assert len(first["params"]) == len(second["params"]) == sum(x.requires_grad for x in names) / 2
    assert {key: x for key, x in first.items() if key not in ("lr", "params")} == {
        key: x for key, x in second.items() if key not in ("lr", "params")
    }


def test_groups_of_an_optimizer_of_ones_own_keep_their_settings() -> None:
    def optimizer(trained: list[Any]) -> torch.optim.Optimizer:
        groups = [{"params": trained[:2]}, {"params": trained[2:3], "lr": 0.2}, {"params": trained[3:4], "lr": 0.3}]
        return torch.optim.SGD(groups, lr=0.1)

    module = tuning(optimizer=optimizer, lora_lr_ratio=10)
    rates = [group["lr"] for group in module.configure_optimizers().param_groups]
    assert rates == pytest.approx([0.1, 0.2, 3.0, 1.0])


def test_a_ratio_without_adapters_or_of_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lora_lr_ratio=2 needs adapters \(add_lora\)"):
        tuning(adapters=False, lora_lr_ratio=2).configure_optimizers()
    for ratio in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"lora_lr_ratio={ratio} must be a positive number"):
            tuning(lora_lr_ratio=ratio)
