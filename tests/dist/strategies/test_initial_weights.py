"""Ranks with different weights, before set-up and after it: training starts from rank 0's, or all ranks raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_cp.callbacks import EMACallback
from lightning_cp.strategies.initial_weights import share_initial_weights
from tests.dist.lightning_ranks import (
    BY_PLAN,
    QUIET,
    STRATEGIES,
    distance,
    fabric_of,
    flat,
    train,
    train_alone,
    trainer_of,
    whole,
)
from tests.dist.module import Mixed, inputs, same_batches
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


def _everything(model: nn.Module) -> Tensor:
    return torch.cat([flat(model), *(buffer.flatten() for buffer in model.buffers())])


def _expected() -> Tensor:
    """Rank 0's weights after two steps of one process."""
    return _everything(train_alone(Mixed(), [inputs()] * 2))


class _Late(Mixed):
    """Rank 0 loads weights in a hook after set-up."""

    def on_train_start(self) -> None:
        if self.trainer.is_global_zero:
            self.load_state_dict(Mixed().state_dict())


def _unlike(rank: int, how: str) -> Mixed:
    """Weights of a seed for each rank; or weights on rank 0 alone, from the start or later."""
    with torch.device("meta") if how == "meta" and rank else nullcontext():
        model = (_Late if how == "late" else Mixed)(1 if how == "late" else rank)
    if how == "late":  # which no state dict holds
        model.scale.copy_(Mixed().scale)
    return model


def _by_hand(module: nn.Module, _: Any) -> nn.Module:
    return fully_shard(module)


def _trained(
    rank: int, world: int, flavour: str, kind: str, hows: list[str], settings: dict[str, Any]
) -> list[tuple[Tensor, bool]]:
    found = []
    for how in hows:
        model = _unlike(rank, how)
        strategy = STRATEGIES[flavour, kind](**{"ring": world, **BY_PLAN, **settings})
        train(rank, world, strategy, model, same_batches())
        found.append((_everything(model), model.tail.weight is model.head.weight))
    return found


@pytest.mark.parametrize(
    ("flavour", "kind", "hows", "world", "settings"),
    [
        ("fabric", "cp_fsdp", ["seeds", "meta"], 3, {}),
        ("fabric", "cp_fsdp", ["meta"], 4, {"ring": 2, "replicate": 2}),
        ("trainer", "cp", ["late"], 3, {}),
        ("fabric", "cp_fsdp", ["seeds", "meta"], 2, {"parallelize_fn": _by_hand}),
        ("fabric", "cp", ["seeds", "meta"], 3, {}),
    ],
)
@pytest.mark.default(3)
def test_training_starts_from_the_first_ranks_weights(
    run_ranks: RankPool, flavour: str, kind: str, hows: list[str], world: int, settings: dict[str, Any]
) -> None:
    expected = _expected()
    for found in run_ranks(world, _trained, flavour, kind, hows, settings, init=False):
        for weights, is_tied in found:
            assert distance(weights, expected) < 1e-5
            assert is_tied


def _without_values(rank: int, world: int) -> tuple[bool, Tensor]:
    """No rank has values: replicated shards and whole children are initialised equally."""
    ours = fabric_of(rank, world, STRATEGIES["fabric", "cp_fsdp"](ring=2, replicate=2, **BY_PLAN))
    with torch.device("meta"):
        model = Mixed()
    torch.manual_seed(rank)
    ours.setup_module(model)
    weights = model.head.weight, model.encoder.weight
    own = [x.to_local() if isinstance(x, DTensor) else x for x in weights]
    return isinstance(weights[0], DTensor) > isinstance(weights[1], DTensor), torch.cat([x.flatten() for x in own])


def test_replicas_without_values_start_alike_and_frozen_children_stay_whole(run_ranks: RankPool) -> None:
    found = run_ranks(4, _without_values, init=False)
    assert all(is_right and own.isfinite().all() for is_right, own in found)
    zero, one, two, three = (own for _, own in found)
    assert torch.equal(zero, two)
    assert torch.equal(one, three)
    assert not torch.equal(zero[:3], one[:3])


FLAWS = {
    "frozen": "head.bias is (3,) float32 trained on rank 0 and (3,) float32 on rank 1",
    "shape": "head.weight is (3, 3) float32 trained on rank 0 and (5, 3) float32 trained on rank 1",
    "more": "steps is no such weight on rank 0 and () float32 on rank 1",
    "meta": "encoder.weight is on the meta device on rank 0 and initialised on rank 1",
}


def _refused(rank: int, world: int, kind: str) -> list[str]:
    said = []
    for flaw in FLAWS:
        ours = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=world, **BY_PLAN))
        with torch.device("meta") if flaw == "meta" and rank != 1 else nullcontext():
            model = Mixed()
        if rank == 1 and flaw == "frozen":
            model.head.bias.requires_grad_(requires_grad=False)
        elif rank == 1 and flaw == "shape":
            model.head = nn.Linear(3, 5)
        elif rank == 1 and flaw == "more":
            model.register_buffer("steps", torch.zeros(()))
        with pytest.raises(ValueError, match="on rank 1") as caught:
            ours.setup(model)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("kind", ["cp", "cp_fsdp"])
@pytest.mark.default(1)
def test_ranks_with_different_modules_are_refused_on_every_rank(run_ranks: RankPool, kind: str) -> None:
    for messages in run_ranks(3, _refused, kind, init=False):
        for message, said in zip(messages, FLAWS.values(), strict=True):
            assert said in message


def _counted(rank: int, world: int) -> tuple[list[int], list[int], Tensor]:
    """Sizes of the broadcasts for equal weights, and where one of them differs in one bit."""
    with mock.patch.object(dist, "broadcast", side_effect=dist.broadcast) as broadcast:
        model = Mixed()
        share_initial_weights(model, torch.device("cpu"))
        equal = [call.args[0].numel() for call in broadcast.call_args_list]
        if rank == world - 1:
            with torch.no_grad():
                model.scale[0] = torch.nextafter(model.scale[0], torch.tensor(2.0))
        share_initial_weights(model, torch.device("cpu"))
        sizes = [call.args[0].numel() for call in broadcast.call_args_list]
    return equal, sizes, whole(model.scale)


def test_only_what_differs_is_sent(run_ranks: RankPool) -> None:
    for equal, sizes, scale in run_ranks(3, _counted):
        assert equal == []
        assert sizes == [3]
        assert torch.equal(scale, Mixed().scale)


# After set-up


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
    "load": (_load, "qkv.weight of Mixed differs: checksum"),
    "shards": (_shards, "any sharded weight of Mixed differs: changed [plain"),
    "data": (_data, "proj_out.weight"),
    "frozen": (_frozen, "encoder.weight of Mixed differs: checksum"),
}


class _LoadsLate(Callback):
    """Change weights in the last hook before the first batch."""

    def __init__(self, how: str) -> None:
        self.how = how

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        LATE[self.how][0](pl_module, trainer.global_rank)


def _changed(rank: int, world: int, flavour: str, kind: str, hows: list[str]) -> list[str]:
    said = []
    for how in hows:
        strategy, model = STRATEGIES[flavour, kind](ring=world, **BY_PLAN), Mixed()
        refused = pytest.raises(ValueError, match="loaded on some ranks only, after set-up")
        if flavour == "trainer":
            with refused as caught:
                train(rank, world, strategy, model, same_batches(), callbacks=[_LoadsLate(how)])
        else:
            ours = fabric_of(rank, world, strategy)
            wrapped, _ = ours.setup(model, model.configure_optimizers())
            if how == "frozen":  # changed before the forward, it changes the arguments of the transformer
                loss = wrapped(inputs()).square().mean()
                LATE[how][0](model, rank)
            else:
                LATE[how][0](model, rank)
                loss = wrapped(inputs()).square().mean()
            with refused as caught:
                ours.backward(loss)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize(
    ("flavour", "kind", "hows"),
    [
        ("fabric", "cp_fsdp", ["shards", "data", "frozen"]),
        ("trainer", "cp", ["load"]),
        ("fabric", "cp", ["load", "data"]),
    ],
)
@pytest.mark.default(2)
def test_weights_changed_on_some_ranks_are_refused_on_every_rank(
    run_ranks: RankPool, flavour: str, kind: str, hows: list[str]
) -> None:
    for said in run_ranks(3, _changed, flavour, kind, hows, init=False):
        for how, message in zip(hows, said, strict=True):
            assert LATE[how][1] in message


def _loaded_on_all(rank: int, world: int, kind: str) -> Tensor:
    """Train from weights that every rank loads after set-up, sharded ones from rank 0's state."""
    ours, model = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=world, **BY_PLAN)), Mixed(5)
    wrapped, optimizer = ours.setup(model, model.configure_optimizers())
    model.scale.copy_(Mixed().scale)  # which no state dict holds
    state: dict[str, Tensor] = Mixed().state_dict() if kind == "cp" or not rank else {}
    if kind == "cp":
        model.load_state_dict(state)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    for _ in range(2):
        ours.backward(wrapped(inputs()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return _everything(model)


@pytest.mark.parametrize("kind", ["cp_fsdp", "cp"])
@pytest.mark.default(1)
def test_weights_loaded_on_every_rank_are_used(run_ranks: RankPool, kind: str) -> None:
    expected = _expected()
    for found in run_ranks(3, _loaded_on_all, kind, init=False):
        assert distance(found, expected) < 1e-5


# Copies of weights that rank 0 alone has loaded in a hook


class _Loads(Callback):
    """Load weights on rank 0 in one hook: all, or those of `only`, which stays whole."""

    def __init__(self, hook: str, only: str) -> None:
        self.hook, self.only = hook, only

    def _load(self, hook: str, trainer: Any, module: nn.Module) -> None:
        if hook == self.hook and trainer.is_global_zero:
            module.get_submodule(self.only).load_state_dict(Mixed(7).get_submodule(self.only).state_dict())

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._load("on_fit_start", trainer, pl_module)

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._load("on_train_start", trainer, pl_module)


class _Copies(Callback):
    """Copy the encoder in both hooks, after `_Loads`."""

    early: nn.Module
    late: nn.Module

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.early = copy.deepcopy(pl_module.encoder)

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.late = copy.deepcopy(pl_module.encoder)
        self.only_on_rank_0 = nn.Linear(2, 2) if trainer.is_global_zero else None


class _Validates(Mixed):
    """Small steps. `losses`: of each validation."""

    def __init__(self) -> None:
        super().__init__(3)
        self.losses: list[float] = []

    def validation_step(self, x: Tensor, _: int) -> None:
        self.losses.append(float(self(x).square().mean()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


_SHORT: dict[str, Any] = {"max_steps": 2, "num_sanity_val_steps": 1, "limit_val_batches": 1}


def _fit(trainer: Trainer, hook: str, average: str, only: str) -> Tensor:
    """Validation losses before and after two steps, and the weights of the copies."""
    module, copies = _Validates(), _Copies()
    # The order of the Trainer: the weights are loaded, then copied.
    averages = EMACallback(0.9) if average == "ours" else WeightAveraging()
    trainer.callbacks[:0] = [_Loads(hook, only), copies, averages]  # type: ignore[attr-defined]
    trainer.fit(module, same_batches(), same_batches())
    return torch.cat([torch.tensor(module.losses), flat(copies.early)[:5], flat(copies.late)[:5]])


def _on_ranks(rank: int, world: int, kind: str, cases: list[tuple[str, str]], only: str) -> list[Tensor]:
    def trainer() -> Trainer:
        return trainer_of(rank, world, STRATEGIES["trainer", kind](ring=world, **BY_PLAN), **_SHORT)

    return [_fit(trainer(), *case, only) for case in cases]


@pytest.mark.parametrize(
    ("kind", "cases", "only"),
    [
        ("cp", [("on_fit_start", "ours"), ("on_train_start", "ours"), ("on_fit_start", "lightnings")], ""),
        ("cp_fsdp", [("on_fit_start", "ours")], "encoder"),
    ],
)
@pytest.mark.default(1)
def test_weights_loaded_on_the_first_rank_are_shared_before_they_are_copied(
    run_ranks: RankPool, kind: str, cases: list[tuple[str, str]], only: str
) -> None:
    settings = {"accelerator": "cpu", "devices": 1, **QUIET, **_SHORT}
    expected = [_fit(Trainer(**settings), *case, only) for case in cases]
    for found in run_ranks(3, _on_ranks, kind, cases, only, init=False):
        for one, right in zip(found, expected, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-5, atol=1e-6)
