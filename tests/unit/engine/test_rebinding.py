"""Functions in which a call of dropout is found, and its replacement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import dropout as alias

from lightning_cp.engine.rebinding import DROPOUTS, rebind


def by_module(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def by_name(x: Tensor) -> Tensor:
    return alias(x, 0.5)


def by_path(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, p=0.5)


def by_nn(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, p=0.5, training=True)


def of_torch(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, train=True)


def in_helper(x: Tensor) -> Tensor:
    return by_module(torch.relu(x))


def in_lambda(x: Tensor) -> Tensor:
    halve: Callable[[Tensor], Tensor] = lambda y: F.dropout(y, 0.5)  # noqa: E731
    return halve(x)


class Holder:
    """Has an attribute of that name."""

    dropout = staticmethod(torch.relu)

    def call(self, x: Tensor) -> Tensor:
        return F.relu(torch.relu(self.dropout(x)))


def _marked(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x + 1


@pytest.mark.parametrize("function", [by_module, by_name, by_path, by_nn, of_torch, in_helper, in_lambda])
def test_calls_of_dropout_are_replaced(function: Any) -> None:
    bound: Any = rebind(function, dict.fromkeys(DROPOUTS, _marked))
    assert bound is not None
    assert torch.equal(bound(torch.ones(4)), torch.full((4,), 2.0))
    assert set(function(torch.ones(64)).tolist()) == {0.0, 2.0}, "the function itself stays as it was"


def test_attributes_named_dropout_are_left() -> None:
    assert rebind(Holder.call, dict.fromkeys(DROPOUTS, _marked)) is None  # type: ignore[arg-type]
    assert rebind(F.silu, dict.fromkeys(DROPOUTS, _marked)) is None  # type: ignore[arg-type]


def test_dropout_modules_call_what_is_replaced() -> None:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    for kind in kinds:
        assert rebind(kind.forward, dict.fromkeys(DROPOUTS, _marked)) is not None  # type: ignore[arg-type]
