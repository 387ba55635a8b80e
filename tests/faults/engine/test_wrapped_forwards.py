"""Wrappers of libraries around `forward`, added before or after `apply_context_parallel`, and removed at any time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.errors import PlanError
from lightning_cp.plans import Plan, split
from tests.dist.compare import averaged, outcome, worst
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool
from tests.models.tiny import randn
from tests.models.wan import wan

_EXACT = 1e-9
Unwrap = Callable[[], None]


def _by_accelerate(module: nn.Module) -> Unwrap:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    add_hook_to_module(module, ModelHook())
    return lambda: remove_hook_from_module(module)


def _by_diffusers(module: nn.Module, hook: Any = None) -> Unwrap:
    from diffusers.hooks import HookRegistry, ModelHook

    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(hook or ModelHook(), "ours")
    return lambda: registry.remove_hook("ours", recurse=False)


def _by_diffusers_in_its_place(module: nn.Module) -> Unwrap:
    from diffusers.hooks import ModelHook

    class Calls(ModelHook):
        def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.fn_ref.original_forward(*args, **kwargs)

    return _by_diffusers(module, Calls())


def _by_decorator(module: nn.Module) -> Unwrap:
    forward = module.forward

    @functools.wraps(forward)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    module.forward = decorated

    def unwrap() -> None:
        module.forward = forward

    return unwrap


def _by_plain_decorator(module: nn.Module) -> Unwrap:
    """A decorator without functools.wraps."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)

    def unwrap() -> None:
        module.forward = forward

    return unwrap


_WRAPPERS = {
    "accelerate": _by_accelerate,
    "diffusers": _by_diffusers,
    "diffusers in its place": _by_diffusers_in_its_place,
    "decorator": _by_decorator,
    "decorator without wraps": _by_plain_decorator,
}


def _model(name: str) -> tuple[Any, dict[str, Any], object]:
    if name == "wan":  # it attends in processors
        return wan().build(), wan().arguments(), None
    torch.manual_seed(0)  # a module that attends in its own forward
    return Plain().double(), {"x": randn(torch.Generator().manual_seed(1), 2, 11, 16)}, PLAIN_PLAN


def _wrapped(rank: int, world: int, name: str, by: str, before: bool) -> tuple[list[float], bool]:
    """Errors of outputs and gradients after each change, and whether nothing is left in the end."""
    model, arguments, plan = _model(name)
    expected, gradients = outcome(model, arguments)
    errors: list[float] = []

    def check() -> None:
        out, found = outcome(model, arguments)
        errors.extend((float((out - expected).abs().max()), worst(averaged(found, world), gradients)))

    modules = [model, *([model.blocks[0].attn1, model.blocks[1]] if name == "wan" else model.blocks)]
    wrap = _WRAPPERS[by]
    unwraps = [wrap(module) for module in modules] if before else []
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), plan)
    check()
    if not before:
        unwraps = [wrap(module) for module in modules]
        check()
    later = [wrap(module) for module in (modules if by == "accelerate" else ())]  # it replaces its own wrapper
    check()
    if "decorator" in by and before:  # the last one goes first
        remove_context_parallel(model)
        check()
        return errors, True
    for unwrap in later or unwraps:
        unwrap()
    check()
    remove_context_parallel(model)
    check()
    return errors, not any(x._forward_hooks or x.forward.__func__ is not type(x).forward for x in modules)


@pytest.mark.parametrize(
    ("name", "by", "before"),
    [
        ("wan", "accelerate", True),
        ("wan", "diffusers in its place", True),
        ("plain", "diffusers", False),
        ("plain", "decorator without wraps", False),
        ("wan", "decorator", True),
    ],
)
@pytest.mark.default(3)
def test_wrappers_of_forward_are_followed(run_ranks: RankPool, name: str, by: str, before: bool) -> None:
    for errors, is_off in run_ranks(2, _wrapped, name, by, before):
        assert len(errors) >= 6
        assert max(errors) < _EXACT
        assert is_off


def _forgets(module: nn.Module) -> None:
    """A forward that no longer attends."""
    module.forward = lambda x: x


@pytest.mark.parametrize("theirs", [True, False])
def test_a_forward_that_makes_no_attention_call_in_place_of_one_that_does_is_refused(theirs: bool) -> None:
    model, _, plan = _model("plain")
    plan = plan if theirs else Plan({"blocks": {"x": split(1, "image")}}, {"proj_out": split(1, "image")})
    _forgets(model.blocks[0])
    with pytest.raises(PlanError, match=r"blocks\.0\.forward was replaced, or decorated"):
        apply_context_parallel(model, ContextParallelConfig(), plan)
    assert not model._forward_hooks
