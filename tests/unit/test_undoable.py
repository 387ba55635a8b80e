"""Changes of one object, and their undo."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn, zeros

from lightning_cp.errors import PlanError
from lightning_cp.undoable import Around, intercept_calls, intercept_method, set_attribute, undo_all


class Scheduler:
    def step(self, x: int) -> int:
        return x + 1

    def __call__(self, x: int) -> int:
        return self.step(x)


def times(factor: int) -> Around:
    return lambda call, args, kwargs: factor * call(*args, **kwargs)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_wrappers_of_a_method_are_undone_in_any_order(order: tuple[int, ...]) -> None:
    thing, factors = Scheduler(), (2, 3, 5)
    undo = [intercept_method(thing, "step", times(factor)) for factor in factors]
    expected = 2 * 3 * 5
    for index in order:
        assert thing.step(1) == expected * 2
        undo[index]()
        expected //= factors[index]
    assert thing.step(1) == 2
    assert vars(thing) == {}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_wrappers_of_calls_of_a_module_are_undone_in_any_order(order: tuple[int, ...]) -> None:
    module, factors = nn.Identity(), (2, 3, 5)
    before = vars(module).copy()
    undo = [intercept_calls(module, times(factor)) for factor in factors]
    assert module(1) == 2 * 3 * 5
    for index in order:
        undo[index]()
    assert module(1) == 1
    assert vars(module) == before


def test_undo_restores_a_function_that_was_set_on_the_instance() -> None:
    """A hook of accelerate is such a function."""
    thing: Any = Scheduler()
    thing.step = hook = lambda x: x + 10
    first, second = (intercept_method(thing, "step", times(factor)) for factor in (2, 3))
    assert thing.step(1) == 66
    first()
    second()
    assert thing.step is hook


def test_a_copy_calls_its_own_method_and_can_be_wrapped_again() -> None:
    thing = Scheduler()
    undo = intercept_method(thing, "step", times(2))
    copied = copy.deepcopy(thing)
    assert copied.step(1) == 4
    undo()
    assert copied.step(1) == 2
    intercept_method(copied, "step", times(3))()
    assert copied.step(1) == 2
    assert vars(copied) == {}


def test_a_copy_of_a_module_compiles_itself() -> None:
    module = nn.Linear(2, 2)
    undo = intercept_calls(module, times(2))
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.weight.zero_()
    compiled: list[Any] = []
    with mock.patch("torch.compile", side_effect=lambda call, **_: compiled.append(call) or call):
        copied.compile(backend="eager")
    assert [call.__self__ for call in compiled] == [copied]
    assert torch.equal(copied(torch.ones(2)), copied.bias)
    assert torch.equal(module(torch.ones(2)), 2 * F.linear(torch.ones(2), module.weight, module.bias))
    undo()


def test_an_attribute_of_the_instance_is_restored_or_removed() -> None:
    module = nn.Linear(2, 2)
    undo = [set_attribute(module, "mark", 1), set_attribute(module, "mark", 2), set_attribute(module, "bias_set", True)]
    assert (vars(module)["mark"], vars(module)["bias_set"]) == (2, True)
    undo_all(undo)
    assert not undo
    assert not vars(module).keys() & {"mark", "bias_set"}


@pytest.mark.parametrize("thing", [Scheduler(), nn.Identity()])
def test_calls_of_an_object_are_wrapped_and_its_class_is_not_changed(thing: Any) -> None:
    other = type(thing)()
    expected = other(1)
    undo = intercept_calls(thing, times(7))
    assert (thing(1), other(1)) == (7 * expected, expected)
    undo()
    assert thing(1) == expected
    assert type(thing) is type(other)


class Doubled(nn.Module):
    """A module that is traced: the compiler does not enter those of torch."""

    def forward(self, x: Any) -> Any:
        return 2 * x


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_module_keeps_the_wrappers_of_its_calls(when: str) -> None:
    module, calls, compiled = Doubled(), [], []

    def around(call: object, args: object, kwargs: object) -> object:
        calls.append(args)
        return call(*args, **kwargs)  # type: ignore[operator, misc]

    def backend(graph: Any, _: object) -> Any:
        compiled.append(graph)
        return graph

    if when == "before":
        module.compile(backend=backend)
    undo = [intercept_calls(module, around) for _ in range(2)]
    if when == "after":
        module.compile(backend=backend)
    module(zeros(1, 2))
    assert (len(calls), len(compiled)) == (2, 1)
    undo_all(undo)
    module(zeros(1, 2))
    assert (len(calls), len(compiled)) == (2, 1), "still compiled"
    assert module._compiled_call_impl is not None
    assert "compile" not in vars(module)


def test_a_refused_compilation_leaves_the_module_as_it_was() -> None:
    def refuse(compiled: object) -> None:
        raise PlanError("not this one")

    module = nn.Linear(2, 2)
    undo = intercept_calls(module, times(7), check_compiled=refuse)
    before = vars(module).copy()
    with pytest.raises(PlanError, match="not this one"):
        module.compile(backend="eager")
    assert vars(module) == before
    undo()
    assert "_compiled_call_impl" not in vars(module)
