"""Methods of an object that a function is found to call, and what replaces the calls in them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp.engine.methods import called_on_first
from lightning_cp.engine.rebinding import DROPOUTS, attention_by_super, makes_attention_call, rebind, rebind_methods


class Parent(nn.Module):
    """Attends and drops in methods."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.half(y) for y in x])

    def half(self, x: Tensor) -> Tensor:
        return self.drop(0.5 * x)

    @staticmethod
    def drop(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    def attend(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Child(Parent):
    """Calls methods of its parent class."""

    def __init__(self) -> None:
        super().__init__()
        self.function = F.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.function(x, x, x)

    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x)


def _marked(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x + 1


def test_methods_are_found_through_other_methods_and_super() -> None:
    assert set(called_on_first(Parent(), Parent.forward).methods) == {"half", "drop"}
    called = called_on_first(Child(), Child.forward)
    assert set(called.methods) == {"half", "drop", "function"}
    assert called.of_parents == [("forward", Parent.forward)]
    assert not called.methods["function"].of_class
    assert not called_on_first(nn.Linear(1, 1), nn.Linear.forward).methods


def test_methods_of_other_objects_are_left() -> None:
    def forward(self: Any, other: Any) -> Any:
        return other.half(self.training)

    assert not called_on_first(Parent(), forward).methods


def test_calls_in_methods_are_replaced() -> None:
    parent = Parent()
    (method, made) = rebind_methods(parent, Parent.forward, dict.fromkeys(DROPOUTS, _marked))["drop"]
    assert method.of_class
    assert isinstance(made, staticmethod)
    parent.__dict__["drop"] = made.__func__
    assert torch.equal(parent(torch.ones(2, 2)), torch.full((2, 2), 1.5))


def test_attention_in_methods_and_in_stored_functions_is_found() -> None:
    child = Child()
    assert makes_attention_call(Child.forward, child)
    assert not makes_attention_call(Child.forward)
    assert not makes_attention_call(Parent.forward, Parent())
    assert attention_by_super(Child.attend, child) == "attend"
    assert attention_by_super(Child.forward, child) is None


def test_functions_in_closures_are_followed() -> None:
    def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Tensor:
            return 2 * function(*args)

        return wrapper

    def drop(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    bound: Any = rebind(decorated(drop), dict.fromkeys(DROPOUTS, _marked))  # type: ignore[arg-type]
    assert torch.equal(bound(torch.ones(2)), torch.full((2,), 4.0))
    assert rebind(decorated(torch.relu), dict.fromkeys(DROPOUTS, _marked)) is None  # type: ignore[arg-type]
