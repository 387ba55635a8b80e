"""The tiny models themselves."""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import pytest
import torch

from lightning_cp.engine.paths import expand
from lightning_cp.errors import PlanError
from lightning_cp.plans import REGISTERED
from tests.models import TINY


@pytest.mark.parametrize("name", ["nucleus_moe", "lumina_next"])
def test_weights_do_not_depend_on_what_memory_held(name: str) -> None:
    """These classes leave parameters uninitialised, and `build` draws numbers for parameters that are zero."""
    with patch("torch.empty", torch.zeros):
        expected = TINY[name].build().state_dict()
    torch.use_deterministic_algorithms(True)  # torch.empty returns NaN
    try:
        found = TINY[name].build().state_dict()
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        assert torch.equal(found[key], weight), key


def test_each_pattern_of_modules_that_run_once_has_a_module_in_a_tiny_model() -> None:
    """A configuration may lack such a module, so at run time a misspelt pattern is silent."""
    patterns = {kind: set(plan.patches.once) for kind, plan in REGISTERED.items() if plan.patches is not None}
    for tiny in TINY.values():
        for pattern in list(patterns.get(tiny.kind, ())):
            with torch.device("meta"), contextlib.suppress(PlanError):
                expand(tiny.make(), pattern)
                patterns[tiny.kind].discard(pattern)
    assert {kind: rest for kind, rest in patterns.items() if rest} == {}
