"""diffusers' hooks are known by the module that defines them; an unknown one is an error."""

from __future__ import annotations

import pkgutil

import diffusers.hooks
import pytest
import torch
from diffusers.hooks import apply_layerwise_casting
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import nn

import lightning_cp.compat.diffusers_names as ours
from lightning_cp.compat.diffusers_names import has_hook, hooks_of
from lightning_cp.compat.versions import IncompatibleVersionError


class _UsersHook(ModelHook):
    pass


def test_every_module_of_diffusers_hooks_is_classified() -> None:
    there = {module.name for module in pkgutil.iter_modules(diffusers.hooks.__path__)}
    assert there == {*ours.KINDS, *ours.WITHOUT_HOOKS}


def test_a_users_own_hook_is_allowed() -> None:
    module = nn.Linear(2, 2)
    HookRegistry.check_if_exists_or_initialize(module).register_hook(_UsersHook(), "mine")
    assert [kind for kind, _ in hooks_of(module)] == [None]


def test_layerwise_casting_is_found() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert not has_hook(module, "cast")
    apply_layerwise_casting(module, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=())
    assert has_hook(module, "cast")


def test_an_unknown_hook_of_diffusers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    HookRegistry.check_if_exists_or_initialize(module).register_hook(_UsersHook(), "new")
    monkeypatch.setattr(_UsersHook, "__module__", "diffusers.hooks.a_new_cache")
    with pytest.raises(IncompatibleVersionError, match=r"a_new_cache\._UsersHook is a hook that lightning_cp was not"):
        list(hooks_of(module))
