"""Changes of what trains after set-up are followed, or refused on every rank; so are unused parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.errors import CallFailedError
from tests.dist.lightning_ranks import BY_PLAN, STRATEGIES, distance, fabric_of, flat
from tests.dist.module import Mixed, inputs
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


def _frozen() -> Mixed:
    """Return a module in which `_unfreeze` unfreezes weights."""
    model = Mixed()
    for child in (model.head, model.plain.proj_out):
        child.requires_grad_(requires_grad=False)
    return model


def _unfreeze(model: Mixed) -> None:
    model.plain.proj_out.requires_grad_(requires_grad=True)


def _freeze(model: Mixed) -> None:
    model.plain.blocks[0].requires_grad_(requires_grad=False)


class _Adapted(nn.Module):
    """A layer and an adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)  # type: ignore[no-any-return]


def _adapt(model: Mixed) -> None:
    model.encoder = _Adapted(model.encoder)  # type: ignore[assignment]


def _cast(model: Mixed) -> None:
    model.double().float()


def _replace(model: Mixed) -> None:
    model.plain.blocks[1].out = nn.Linear(16, 16)


def _assign(model: Mixed) -> None:
    layer = model.plain.blocks[1].out
    layer.weight = nn.Parameter(layer.weight.detach())


@torch.no_grad()
def _evaluate(model: Mixed) -> None:
    """Edit, freeze and unfreeze weights after an evaluation."""
    model(inputs())
    for x in model.plain.blocks.parameters():
        x.mul_(0.9)
    _freeze(model)
    _unfreeze(model)


def _steps(model: Mixed, change: Callable[[Mixed], None], wrapped: Any = None, fabric: Any = None) -> Tensor:
    """Train two steps, the second one in two micro-steps after a change between them."""
    wrapped = wrapped or model
    for step in range(2):
        for micro in range(step + 1):
            loss = lambda: wrapped(inputs()).square().mean()  # noqa: E731
            if fabric is None:
                loss().backward()
            else:
                with fabric.no_backward_sync(wrapped, enabled=micro < step):
                    fabric.backward(loss())
            if micro < step:
                change(model)
        with torch.no_grad():
            for x in model.parameters():
                if x.grad is not None:
                    x -= x.grad
                    x.grad = None
    return flat(model)


FOLLOWED: dict[tuple[str, str], tuple[Callable[[Mixed], None], dict[str, Any]]] = {
    ("cp", "freeze"): (_freeze, {"find_unused_parameters": True}),
    ("cp_fsdp", "freeze"): (_freeze, {}),
    ("cp_fsdp", "unfreeze"): (_unfreeze, {}),
    ("cp_fsdp", "evaluate"): (_evaluate, {"reshard_after_forward": False}),
}


def _followed(rank: int, world: int, kind: str, how: str) -> Tensor:
    change, settings = FOLLOWED[kind, how]
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=world, **settings, **BY_PLAN))
    model = _frozen()
    return _steps(model, change, fabric.setup(model), fabric)


@pytest.mark.parametrize(("kind", "how"), FOLLOWED)
@pytest.mark.default(1)
def test_a_change_between_steps_trains_as_in_one_process(run_ranks: RankPool, kind: str, how: str) -> None:
    expected, without = (_steps(_frozen(), change) for change in (FOLLOWED[kind, how][0], lambda _: None))
    for trained in run_ranks(3, _followed, kind, how, init=False):
        assert distance(trained, expected) < 1e-5
        assert distance(trained, without) > 1e-4


class _WithUnused(Mixed):
    """Has a trained layer that its loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


CHANGES: dict[str, Callable[[Mixed], Any]] = {
    "unfreeze": _unfreeze,
    "freeze": _freeze,
    "add": _adapt,
    "cast": _cast,
    "double": lambda model: model.double(),
    "replace": _replace,
    "assign": _assign,
    "whole": lambda model: model.head.requires_grad_(requires_grad=True),
    "stop": lambda model: model.requires_grad_(requires_grad=False),
    "detach": lambda model: model.register_forward_hook(lambda *call: call[2].detach()),
    "none": lambda _: None,
}


def _refused(rank: int, world: int, kind: str, how: str, settings: dict[str, Any]) -> str:
    """Change all ranks, or `one` of them, after the first step; or `within` it."""
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](**{"ring": world, **BY_PLAN, **settings}))
    name, _, when = how.partition(" ")
    model = _WithUnused() if name == "none" else _frozen()
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    change = partial(CHANGES[name] if when != "one" or rank == 1 else CHANGES["none"], model)
    try:
        for _ in range(2):
            loss = wrapped(inputs()).square().mean()
            if when == "within":
                change()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if when != "within":
                change()
    except (ValueError, CallFailedError) as error:
        return str(error)
    return "nothing was refused"


_FINDS: dict[str, Any] = {"find_unused_parameters": True}
_FREEZE = "freeze and unfreeze the same weights, on every rank"
_SAME = f"cast, replace, {_FREEZE}"
_BUCKETS = "after set-up, and DistributedDataParallel averages gradients of the parameters of set-up only"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("cp", "unfreeze one", {}, _FREEZE),
    ("cp", "unfreeze one", {"ring": 1}, _FREEZE),
    ("cp", "freeze one", _FINDS, _FREEZE),
    ("cp", "unfreeze", _FINDS, f"plain.proj_out.weight began to train {_BUCKETS}"),
    ("cp", "unfreeze within", {}, f"plain.proj_out.weight began to train {_BUCKETS}"),
    ("cp", "add", {"ring": 1}, f"encoder.adapter.weight began to train {_BUCKETS}"),
    ("cp", "freeze", {}, f"plain.blocks.0.qkv.weight was frozen or removed {_BUCKETS}"),
    ("cp", "freeze", {"static_graph": True}, f"plain.blocks.0.qkv.weight was frozen or removed {_BUCKETS}"),
    ("cp", "cast", {}, f"plain.blocks.0.qkv.weight was cast, moved or replaced {_BUCKETS}"),
    ("cp", "assign", {}, f"plain.blocks.1.out.weight was cast, moved or replaced {_BUCKETS}"),
    ("cp", "assign one", {}, f"what trains differs: as before on rank 0, changed on rank 1: {_SAME}"),
    ("cp", "cast one", {"ring": 1}, f"what trains differs: as before on rank 0, changed on rank 1: {_SAME}"),
    ("cp", "stop one", _FINDS, _SAME),
    ("cp", "detach one", {}, f"the loss differs: has a graph on rank 0, has no graph on rank 1: {_SAME}"),
    ("cp", "none", {}, "does not use the trained parameters spare.weight, spare.bias, so"),
    ("cp_fsdp", "unfreeze one", {}, _FREEZE),
    ("cp_fsdp", "freeze one", {}, _FREEZE),
    (
        "cp_fsdp",
        "replace one",
        {},
        "plain.blocks.1.out.weight differs: trains in torch.float32 on cpu, sharded on rank 0",
    ),
    ("cp_fsdp", "detach one", {}, "the loss differs: has a graph on rank 0, has no graph on rank 1"),
    ("cp_fsdp", "double", {}, "were cast or moved (to torch.float64 on cpu) after the first forward"),
    ("cp_fsdp", "double one", {}, "were cast or moved (to torch.float64 on cpu) after the first forward"),
    ("cp_fsdp", "replace", {}, "plain.blocks.1.out.weight began to train after set-up and is not sharded"),
    ("cp_fsdp", "assign one", {"ring": 1}, "were replaced (weight of Linear) after the first forward"),
    ("cp_fsdp", "whole", {}, "head.weight began to train after set-up and is not sharded"),
]


@pytest.mark.parametrize("every", [6, 1])
def test_what_cannot_be_followed_is_refused_on_every_rank(run_ranks: RankPool, every: int) -> None:
    for kind, how, settings, message in REFUSED[::every]:
        for said in run_ranks(3, _refused, kind, how, settings, init=False):
            assert message in said, how


def _drawn(rank: int, world: int, name: str, settings: dict[str, Any]) -> tuple[str, int]:
    """Draw other numbers into a weight on each data group, after the third step."""
    kind = "cp_fsdp" if settings else "cp"
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=1, **BY_PLAN, **settings))
    model = Mixed()
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    for step in range(20):
        try:
            fabric.backward(wrapped(inputs()).square().mean() * 1e-3)
        except ValueError as error:
            return str(error), step
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                x: Any = model.get_parameter(name)
                (x.to_local() if settings else x).normal_(generator=torch.Generator().manual_seed(rank))
    return "nothing was refused", 0


@pytest.mark.parametrize(
    ("name", "world", "settings", "shown"),
    [
        ("encoder.bias", 3, {}, "encoder.bias"),
        ("plain.blocks.0.qkv.weight", 4, {"replicate": 2}, "plain.blocks.0.qkv.weight of shard [0]"),
    ],
)
@pytest.mark.default(1)
def test_other_values_in_replicated_weights_are_refused_on_every_rank(
    run_ranks: RankPool, name: str, world: int, settings: dict[str, Any], shown: str
) -> None:
    for said, step in run_ranks(world, _drawn, name, settings, init=False):
        assert f"{shown} differs: checksum" in said
        assert "must draw the same numbers on every rank" in said
        assert step == 8
