"""Wrappers of a module's calls."""

from __future__ import annotations

import pytest
from lightning_cp.pipelines.patching import intercept_calls
from torch import nn, zeros

from lightning_cp.errors import PlanError


def test_compile_cannot_drop_a_wrapper_of_calls() -> None:
    module, calls = nn.Linear(2, 2), []

    def around(call: object, args: object, kwargs: object) -> object:
        calls.append(args)
        return call(*args, **kwargs)  # type: ignore[operator, misc]

    undo = intercept_calls(module, around)
    with pytest.raises(PlanError, match=r"Linear\.compile\(\) would drop the wrapper .* before parallelize_pipeline"):
        module.compile(backend="eager")
    module(zeros(1, 2))
    assert len(calls) == 1
    undo()
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None
    assert "compile" not in vars(module)
