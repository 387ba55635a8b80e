"""Checkpointed inputs in host memory: order of the copies, what is copied, when it is freed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp import OffloadCheckpoint
from lightning_cp.comm.background import SideStream
from lightning_cp.compat.torch_names import in_backward
from lightning_cp.engine import recompute
from tests.dist.compare import outcome
from tests.models import TINY

DEPTH = 4


class Block(nn.Module):
    """A layer with dropout that notes its runs."""

    def __init__(self, log: list[str], number: int) -> None:
        super().__init__()
        self.layer, self.log, self.number = nn.Linear(8, 8), log, number

    def forward(self, x: Tensor, shift: Tensor, *, small: Tensor | None = None) -> Tensor:
        self.log.append(f"run {self.number}")
        x = torch.tanh(self.layer(x) + shift)
        return nn.functional.dropout(x if small is None else x * small, 0.2)


class Stack:
    """Blocks, a checkpoint function, and a log of what runs and what is copied."""

    def __init__(self, how: Any = None) -> None:
        torch.manual_seed(0)
        self.log: list[str] = []
        self.blocks = nn.ModuleList(Block(self.log, i) for i in range(DEPTH))
        self.how = how or (lambda block, *args, **kwargs: checkpoint(block, *args, use_reentrant=False, **kwargs))

    def forward(self, x: Tensor, shift: Tensor, small: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.how(block, x, shift, small=small)
        return x

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.blocks.parameters() if p.grad is not None]


def given(seed: int = 1, rows: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, shift = (torch.randn(rows, 8, generator=generator) for _ in range(2))
    return x, shift.requires_grad_(), torch.rand(8, generator=generator)


@contextmanager
def logged(log: list[str]) -> Iterator[None]:
    original = SideStream.copy

    def noted(side: SideStream, target: Tensor, source: Tensor) -> Tensor:
        log.append("back" if in_backward() else "out")
        return original(side, target, source)

    with mock.patch.object(SideStream, "copy", noted):
        yield


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Yield a function that counts the blocks with inputs in host memory."""
    living: list[weakref.ref[Any]] = []
    original = recompute._Inputs.__init__

    def noted(inputs: Any, *args: Any) -> None:
        original(inputs, *args)
        living.append(weakref.ref(inputs))

    with mock.patch.object(recompute._Inputs, "__init__", noted):
        yield lambda: sum(x() is not None for x in living)


def test_inputs_leave_in_forward_and_return_one_block_ahead() -> None:
    stack = Stack(OffloadCheckpoint(512))
    x, shift, small = given()
    with logged(stack.log):
        out = stack.forward(x, shift, small).square().sum()
        forward = list(stack.log)
        stack.log.clear()
        out.backward()
    # The second tensor of block 0 is given to all blocks: it leaves once, and returns for block 0.
    assert forward == ["out", "out", "run 0", "out", "run 1", "out", "run 2", "out", "run 3"]
    assert stack.log == ["back", "back", "run 3", "back", "run 2", "back", "back", "run 1", "run 0"]


def _two_forwards(stack: Stack) -> None:
    first = stack.forward(*given(1)).square().sum()
    second = stack.forward(*given(2, rows=24)).square().sum()
    (first + 2 * second).backward()


def _accumulated(stack: Stack) -> None:
    for seed in (1, 2):
        stack.forward(*given(seed)).square().sum().backward()


def _first_forward_last(stack: Stack) -> None:
    losses = [stack.forward(*given(seed)).square().sum() for seed in (1, 2)]
    for loss in losses:
        loss.backward()


def _twice(stack: Stack) -> None:
    loss = stack.forward(*given()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _without_backward(stack: Stack) -> None:
    stack.forward(*given(2))
    with torch.no_grad():
        stack.forward(*given(2))
    stack.blocks.eval()
    stack.forward(*given()).square().sum().backward()


@pytest.mark.parametrize("steps", [_two_forwards, _accumulated, _first_forward_last, _twice, _without_backward])
def test_gradients_are_those_of_full_checkpointing_and_host_memory_is_freed(steps: Callable[[Stack], None]) -> None:
    expected, found = Stack(), Stack(OffloadCheckpoint(0))
    with counted() as living:
        for stack in (expected, found):
            torch.manual_seed(3)
            steps(stack)
        assert living() == 0, "freed without the garbage collector"
    assert all(map(torch.equal, found.gradients(), expected.gradients()))
    assert found.gradients()


def test_a_forward_that_fails_frees_its_inputs() -> None:
    stack = Stack(OffloadCheckpoint(0))
    with counted() as living:
        with mock.patch.object(Block, "forward", side_effect=KeyError("no")), pytest.raises(KeyError):
            stack.forward(*given())
        loss = stack.forward(*given()).square().sum()
        with mock.patch.object(Block, "forward", side_effect=KeyError("no")), pytest.raises(KeyError):
            loss.backward()
        del loss
        gc.collect()  # a traceback is a part of cycles
        assert living() == 0
        _accumulated(stack)
        assert living() == 0


def test_a_block_that_changes_its_input_is_refused() -> None:
    x = given()[0]
    with pytest.raises(RuntimeError, match="a block changes an input in place"):
        OffloadCheckpoint(0)(lambda x: x.mul_(2).sin(), x)


def test_weights_and_small_inputs_stay_on_the_device() -> None:
    log: list[str] = []
    with logged(log):
        OffloadCheckpoint()(lambda x, y: x * y, *(torch.ones(8, requires_grad=True) for _ in range(2)))
        OffloadCheckpoint(0)(lambda x: x * 2, nn.Parameter(torch.ones(8)))
    assert log == []


def test_copies_of_a_model_have_a_checkpoint_function_of_their_own() -> None:
    how = OffloadCheckpoint(7)
    how(torch.sin, given()[0])
    for other in (copy.deepcopy(how), pickle.loads(pickle.dumps(how))):
        assert other is not how
        assert other._min_bytes == 7


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo reads it
def test_a_model_of_compiled_blocks_is_bit_equal_to_full_checkpointing() -> None:
    found = []
    for how in (None, OffloadCheckpoint(0)):
        model: Any = TINY["wan"].build().train()
        model.enable_gradient_checkpointing(gradient_checkpointing_func=how)
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        found.append(outcome(model, TINY["wan"].arguments()))
    (out, gradients), (own_out, own) = found
    assert torch.equal(out, own_out)
    assert all(x is None if own[key] is None else torch.equal(x, own[key]) for key, x in gradients.items())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_model_that_is_compiled_as_a_whole_runs_eager_blocks_or_is_refused() -> None:
    model: Any = TINY["wan"].build().train()
    expected = outcome(model, TINY["wan"].arguments())[0]
    model.enable_gradient_checkpointing(gradient_checkpointing_func=OffloadCheckpoint(0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile its blocks one by one"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(**TINY["wan"].arguments())
    torch._dynamo.reset()
    found = outcome(torch.compile(model, backend="aot_eager"), TINY["wan"].arguments())[0]
    assert float((found - expected).abs().max()) < 1e-9
