"""Dropout on shards: masks differ between ranks, and all other random numbers stay the same on all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallelConfig, remove_context_parallel
from lightning_cp.engine.apply import parallelize
from tests.dist.plain import PLAIN_PLAN, Block, Plain
from tests.harness import RankPool


class Keeps(nn.Module):
    """Notes which elements were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.seen.append(x.detach() == 0)
        return x


def halved(x: Tensor, training: bool) -> Tensor:
    """A helper function that drops."""
    return dropout(x, 0.5, training)


class Functional(nn.Module):
    """Drops in its forward, without a module, and in a helper of a method; labels are dropped by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Block(16, 4)
        self.keeps = Keeps()
        self.labels: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.labels.append(torch.rand(len(x)))
        x = self.attend(x)
        once = torch.nn.functional.dropout(torch.ones_like(x), p=0.5, training=self.training)
        both = self.keeps(once) * self.keeps(self._halved(torch.ones_like(x)))
        return x + F.dropout(both, 0.1, self.training)

    def _halved(self, x: Tensor) -> Tensor:
        return halved(x, self.training)


class Inherited(nn.Dropout):
    """A dropout module that leaves dropping to its parent."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def _parallel(model: nn.Module, world: int) -> nn.Module:
    parallelize(model, ContextParallelConfig(ring_degree=world), PLAIN_PLAN)
    return model


def _with_dropout(p: float, kind: type[nn.Dropout] = nn.Dropout) -> Plain:
    """Dropout between the blocks' attention and their output, and on the whole input."""
    model = Plain()
    for block in model.blocks:
        block.out = nn.Sequential(block.out, kind(p), Keeps())
    return model


def _seen(model: Any) -> list[Tensor]:
    """The masks of the blocks since the last call; of each, tokens x elements."""
    found = [mask[0] for inner in model.modules() if isinstance(inner, Keeps) for mask in inner.seen]
    for inner in model.modules():
        if isinstance(inner, Keeps):
            inner.seen.clear()
    return found


def _functional(model: Any, x: Tensor) -> None:
    """Called without a module."""
    model(x)


def _added(model: Any, x: Tensor) -> None:
    """Modules that were put in after the third forward."""
    for block in model.blocks:
        block.out = block.out[:1]
    for _ in range(3):
        model(x)
    for block in model.blocks:
        block.out = nn.Sequential(block.out[0], nn.Dropout(0.5), Keeps())
    model(x)


def _raised(model: Any, x: Tensor) -> None:
    """Modules with p = 0 in the first three forwards."""
    for _ in range(3):
        model(x)
    _seen(model)
    for block in model.blocks:
        block.out[1].p = 0.5
    model(x)


MODELS: dict[str, Any] = {
    "functional": lambda: _changed(Plain(), Functional),
    "added": lambda: _with_dropout(0.5),
    "raised": lambda: _with_dropout(0.0),
    "inherited": lambda: _with_dropout(0.5, Inherited),
}
RUNS: dict[str, Any] = {"functional": _functional, "added": _added, "raised": _raised, "inherited": _functional}


def _changed(model: Plain, kind: type[nn.Module]) -> Plain:
    model.blocks = nn.ModuleList([kind() for _ in model.blocks])
    return model


def _dropped(rank: int, world: int, kind: str, tokens: int) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Masks of this rank's shards, a draw after the forward, and what was drawn by sample."""
    torch.manual_seed(0)
    model = _parallel(MODELS[kind](), world)
    RUNS[kind](model, torch.ones(1, tokens, 16))
    labels = [x for block in model.blocks for x in getattr(block, "labels", ())]  # type: ignore[union-attr]
    return _seen(model), torch.rand(3), labels


@pytest.mark.parametrize("kind", list(RUNS))
@pytest.mark.default(3)
def test_dropout_of_any_kind_draws_apart_and_the_rest_alike(run_ranks: RankPool, kind: str) -> None:
    """Shards of 11 tokens are of unequal length, and would draw unequally many numbers."""
    found = run_ranks(3, _dropped, kind, 11)
    check_masks([masks for masks, _, _ in found])
    for _, after, labels in found:
        assert torch.equal(after, found[0][1])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(labels, found[0][2], strict=True))


def check_masks(everyones: list[list[Tensor]]) -> None:
    """About half of the elements are dropped, and no two masks of all blocks and ranks are the same."""
    masks = [mask for masks in everyones for mask in masks]
    assert len(masks) >= 2 * len(everyones)
    assert all(0.25 < mask.float().mean() < 0.75 for mask in masks)
    shortest = min(len(mask) for mask in masks)
    assert len({mask[:shortest].numpy().tobytes() for mask in masks}) == len(masks)


def _replayed(rank: int, world: int, kind: str) -> list[Tensor]:
    """Gradients without and with activation checkpointing."""
    torch.manual_seed(0)
    model: Any = _parallel(MODELS[kind](), world)
    gradients = []
    for around in (lambda block, x: block(x), lambda block, x: checkpoint(block, x, use_reentrant=False)):
        torch.manual_seed(1)
        model.around = around
        model.zero_grad()
        model(torch.ones(1, 11, 16, requires_grad=True))[0].square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return gradients


@pytest.mark.parametrize("kind", ["functional", "added", "inherited"])
def test_replays_drop_the_same_elements(run_ranks: RankPool, kind: str) -> None:
    for once, replayed in run_ranks(2, _replayed, kind):
        assert torch.equal(once, replayed)


def _quiet(rank: int, world: int) -> list[bool]:
    """True if nothing was drawn: with p = 0, in evaluation, and once the plan was taken off (but for dropout)."""
    torch.manual_seed(0)
    found = []
    for model in (_with_dropout(0.0), _with_dropout(0.5).eval()):
        _parallel(model, world)
        before = torch.get_rng_state()
        model(torch.ones(1, 11, 16))
        found.append(torch.equal(torch.get_rng_state(), before))
    model = _with_dropout(0.5)
    forwards = [inner.forward.__func__ for inner in model.modules()]
    remove_context_parallel(_parallel(model, world))
    found.append([inner.forward.__func__ for inner in model.modules()] == forwards)
    found.append(not any("forward" in inner.__dict__ for inner in model.modules()))
    return found


def test_models_that_drop_nothing_draw_nothing(run_ranks: RankPool) -> None:
    assert all(map(all, run_ranks(2, _quiet)))


class Interrupted(nn.Dropout):
    """Drops, and is interrupted by the user."""

    def forward(self, input: Tensor) -> Tensor:
        super().forward(input)
        raise KeyboardInterrupt


def _interrupted(rank: int, world: int) -> Tensor:
    torch.manual_seed(0)
    model = _parallel(_with_dropout(0.5, Interrupted), world)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 11, 16))
    return torch.rand(3)


def test_an_interrupt_within_dropout_leaves_the_shared_state(run_ranks: RankPool) -> None:
    first, second = run_ranks(2, _interrupted)
    assert torch.equal(first, second)


class Visible(nn.Module):
    """Its output is its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Block(16, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x) * 0 + F.dropout(self.dropout(torch.ones_like(x)), 0.1, self.training)


def _compiled(rank: int, world: int, backend: str, tokens: int, whole: bool) -> tuple[list[Tensor], Tensor, bool]:
    """Masks, a draw after the forward, and whether gradients are those of the masks."""
    torch.manual_seed(0)
    model: Any = _changed(Plain(), Visible)
    model.proj_out = nn.Identity()
    _parallel(model, world)
    for module in [model] if whole else model.blocks:
        module.compile(backend=backend, fullgraph=True)
    masks = []
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)  # asked by the compiler
            out = model(torch.ones(1, tokens, 16))[0]
        masks.append(out[0] == 0)
    last = model.blocks[-1]
    return masks, torch.rand(3), bool(torch.isin(out, torch.tensor([0.0, 2 / 0.9])).all() and last.training)


@pytest.mark.parametrize(("world", "backend", "whole"), [(3, "aot_eager", True), (3, "inductor", False)])
@pytest.mark.full
def test_compiled_blocks_draw_apart(run_ranks: RankPool, world: int, backend: str, whole: bool) -> None:
    tokens = 4 * world
    found = run_ranks(world, _compiled, backend, tokens, whole, timeout_s=240.0)
    check_masks([list(mask.split(4)) for masks, _, _ in found[:1] for mask in masks])
    for masks, after, scaled in found:
        assert scaled
        assert torch.equal(after, found[0][1])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(masks, found[0][0], strict=True))
