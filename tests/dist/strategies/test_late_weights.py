"""Weights that are loaded on some ranks only, after set-up: an error in the first backward, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.dist.lightning_ranks import fabric_of, trainer_of
from tests.dist.strategies.test_initial_weights import BY_PLAN, STRATEGIES, Mixed, everything, expected, inputs
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


def _load(model: Mixed, rank: int) -> None:
    if not rank:
        model.plain.load_state_dict(Mixed(1).plain.state_dict())


@torch.no_grad()
def _shards(model: Mixed, rank: int) -> None:
    for x in model.parameters() if not rank else ():
        if isinstance(x, DTensor):
            x.to_local().mul_(2)


@torch.no_grad()
def _data(model: Mixed, rank: int) -> None:
    if rank == 2:
        weight: Any = model.plain.proj_out.weight
        (weight.to_local() if isinstance(weight, DTensor) else weight).data[:1] += 1


@torch.no_grad()
def _frozen(model: Mixed, rank: int) -> None:
    if rank == 1:
        model.encoder.weight.mul_(2)


LATE: dict[str, tuple[Callable[[Mixed, int], None], str]] = {
    "load": (_load, "qkv.weight of _LoadsLate differs: checksum"),
    "shards": (_shards, "any sharded weight of _LoadsLate differs: changed [plain"),
    "data": (_data, "proj_out.weight"),
    "frozen": (_frozen, "encoder.weight of _LoadsLate differs: checksum"),
}


class _LoadsLate(Mixed):
    """Loads weights in the last hook before the first batch."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(0)
        self.rank, self.how = rank, how

    def on_train_epoch_start(self) -> None:
        LATE[self.how][0](self, self.rank)


def _refused(rank: int, world: int, flavour: str, kind: str, hows: list[str]) -> list[str]:
    said = []
    for how in hows:
        strategy = STRATEGIES[flavour, kind](ring=world, **BY_PLAN)
        model = _LoadsLate(rank, how)
        if flavour == "trainer":
            trainer = trainer_of(rank, world, strategy, max_steps=2)
            copies: Any = [inputs()[i] for _ in range(2) for i in range(2)]
            with pytest.raises(ValueError, match="loaded on some ranks only, after set-up") as caught:
                trainer.fit(model, DataLoader(copies, batch_size=2, shuffle=False))
        else:
            ours = fabric_of(rank, world, strategy)
            wrapped, _ = ours.setup(model, model.configure_optimizers())
            if how == "frozen":  # changed before the forward, it changes the arguments of the transformer
                loss = wrapped(inputs()).square().mean()
                LATE[how][0](model, rank)
            else:
                LATE[how][0](model, rank)
                loss = wrapped(inputs()).square().mean()
            with pytest.raises(ValueError, match="loaded on some ranks only, after set-up") as caught:
                ours.backward(loss)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize(
    ("flavour", "kind", "hows"),
    [
        pytest.param("fabric", "cp", ["load", "data"], marks=pytest.mark.full),
        ("fabric", "cp_fsdp", ["shards", "data", "frozen"]),
        ("trainer", "cp", ["load"]),
        pytest.param("trainer", "cp_fsdp", ["shards"], marks=pytest.mark.full),
    ],
)
def test_weights_loaded_on_some_ranks_are_refused_on_every_rank(
    run_ranks: RankPool, flavour: str, kind: str, hows: list[str]
) -> None:
    for said in run_ranks(3, _refused, flavour, kind, hows, init=False):
        for how, message in zip(hows, said, strict=True):
            assert LATE[how][1] in message


def _loaded_on_all(rank: int, world: int, kind: str) -> float:
    """Error of training from weights that every rank loads after set-up, sharded ones from rank 0's state."""
    ours = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=world, **BY_PLAN))
    model = Mixed(5)
    wrapped, optimizer = ours.setup(model, model.configure_optimizers())
    model.scale.copy_(Mixed(0).scale)  # which no state dict holds
    state: dict[str, Tensor] = Mixed(0).state_dict() if kind == "cp" or not rank else {}
    if kind == "cp":
        model.load_state_dict(state)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    for _ in range(2):
        ours.backward(wrapped(inputs()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return float((everything(model) - expected()).norm() / expected().norm())


@pytest.mark.parametrize("kind", ["cp", "cp_fsdp"])
def test_weights_loaded_on_every_rank_are_used(run_ranks: RankPool, kind: str) -> None:
    assert max(run_ranks(3, _loaded_on_all, kind, init=False)) < 1e-5
