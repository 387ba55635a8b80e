"""Settings of strategies and optimizers that differ between ranks, at set-up or later: one error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_cp.errors import PeerMismatchError
from tests.dist.lightning_ranks import STRATEGIES, fabric_of, trainer_of
from tests.dist.module import Clips, TrainsWan
from tests.harness import RankPool

SGD, ADAM = torch.optim.SGD, torch.optim.AdamW
CASES: dict[str, Any] = {
    "lr": (lambda p: SGD(p, lr=0.1), lambda p: SGD(p, lr=0.2), "lr of SGD in group 0 differs: 0.1 on rank 0, 0.2 on"),
    "class": (
        lambda p: ADAM(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1),
        "class of optimizer 0 differs: AdamW on rank 0, Adam on",
    ),
    "betas": (
        lambda p: ADAM(p, lr=0.1),
        lambda p: ADAM(p, lr=0.1, betas=(0.8, 0.999)),
        "betas of AdamW in group 0 differs: (0.9, 0.999) on rank 0, (0.8, 0.999) on",
    ),
    "groups": (
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD([{"params": p[:1]}, {"params": p[1:]}], lr=0.1),
        "number of parameter groups of SGD differs: 1 on rank 0, 2 on",
    ),
    "frozen": (
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD(p[1:], lr=0.1),
        "number of parameters in group 0 of SGD differs: 2 on rank 0, 1 on",
    ),
}


def _set_up(rank: int, world: int, kind: str, degrees: dict[str, int]) -> list[str]:
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](**degrees))
    messages = []
    for first, other, _ in CASES.values():
        model = nn.Linear(2, 2)
        wrapped = fabric.setup_module(model)
        with pytest.raises(PeerMismatchError) as error:
            fabric.setup_optimizers((other if rank == world - 1 else first)(list(wrapped.parameters())))
        messages.append(str(error.value))
    return messages


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "degrees"), [("cp", {"ring": 3}), ("cp_fsdp", {})])
@pytest.mark.default(1)
def test_unequal_optimizers_are_an_error_at_set_up(run_ranks: RankPool, kind: str, degrees: dict[str, int]) -> None:
    for messages in run_ranks(3, _set_up, kind, degrees, init=False):
        for message, (_, _, expected) in zip(messages, CASES.values(), strict=True):
            assert f"{expected} rank 2" in message


class _Scheduled(TrainsWan):
    """Its learning rate differs on the last rank, from the second step on or from the beginning."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self._at_once, self.steps = at_once, 0

    def configure_optimizers(self) -> Any:
        is_last = self.global_rank == self.trainer.world_size - 1
        optimizer = SGD(self.parameters(), lr=0.2 if is_last and self._at_once else 0.1)
        scheduler = LambdaLR(optimizer, lambda step: 0.5 if is_last and step else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1


def _fit(rank: int, world: int, at_once: bool) -> tuple[str, int]:
    module = _Scheduled(at_once=at_once)
    trainer = trainer_of(rank, world, STRATEGIES["trainer", "cp"](ring=world), max_steps=12)
    with pytest.raises(PeerMismatchError) as error:
        trainer.fit(module, torch.utils.data.DataLoader(Clips(24), batch_size=2))
    return str(error.value), module.steps


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_finds_unequal_optimizers_and_schedules(run_ranks: RankPool) -> None:
    for at_once, steps, values in ((True, 0, ("0.1", "0.2")), (False, 7, ("0.1", "0.05"))):
        for message, done in run_ranks(3, _fit, at_once, init=False):
            assert f"lr of SGD in group 0 differs: {values[0]} on rank 0, {values[1]} on rank 2" in message
            assert done == steps


def _unequal_settings(rank: int, world: int, settings: dict[str, Any]) -> str:
    is_last = rank == world - 1
    kind = "cp_fsdp" if settings.pop("sharded", False) and is_last else "cp"
    with pytest.raises(PeerMismatchError) as error:
        fabric_of(rank, world, STRATEGIES["fabric", kind](**(settings if is_last else {})))
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ring": 3}, "ring differs: 1 on rank 0, 3 on rank 2"),
        ({"check_peers": "off"}, "check_peers differs: 'sampled' on rank 0, 'off' on rank 2"),
        (
            {"sharded": True},
            "strategy differs: ContextParallelStrategy on rank 0, ContextParallelFSDPStrategy on rank 2",
        ),
    ],
)
def test_unequal_settings_are_refused_before_groups_are_built(
    run_ranks: RankPool, settings: dict[str, Any], message: str
) -> None:
    for said in run_ranks(3, _unequal_settings, settings, init=False, timeout_s=60):
        assert message in said
