"""The table of private attributes holds in the installed versions, and a missing one is one clear error."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch
from lightning.pytorch.strategies import ddp as trainer_ddp
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy
from torch import nn

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.compat import check
from lightning_cp.compat.check import (
    TABLE,
    TRAINER_SETUP,
    PrivateUse,
    check_private_uses,
    check_unchanged,
    check_uses,
    owner_of,
)
from lightning_cp.compat.versions import TESTED, IncompatibleVersionError, private_names
from lightning_cp.pytorch import ContextParallelStrategy
from tests.unit.compat.private_uses import is_private, nodes_of, sources


@pytest.fixture(autouse=True)
def _nothing_is_checked_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_CHECKED", set())


def test_every_entry_exists_in_the_installed_version() -> None:
    owners = [(use, owner_of(use, load=True)) for use in TABLE]
    assert [use.owner for use, owner in owners if owner is None] == [], "these cannot be imported"
    check_uses(owners)


def test_every_private_attribute_of_other_objects_is_in_the_table() -> None:
    ours = {name for _, tree in sources() for name in _defined(tree)}
    known = {use.name for use in TABLE} | _OF_PYTHON
    read = {(name, path) for path, tree in sources() for name in _accessed(tree) if name not in ours}
    unknown = sorted(f"{path}: {name}" for name, path in read if name not in known)
    assert not unknown, "add these to lightning_cp/compat/check.py:\n" + "\n".join(unknown)


def test_every_overridden_private_method_is_in_the_table() -> None:
    ours = {name for _, tree in sources() for name in _defined(tree, methods_of_super=False)}
    called = {(path, name) for path, tree in sources() for name in _called_on_super(tree)}
    known = {use.name for use in TABLE}
    own = {"_wrap", "_share_random_state"}  # methods of our own base classes
    assert {name for _, name in called} & ours, "the rule finds something"
    assert not sorted(f"{path}: super().{name}" for path, name in called if name not in known | own)


def test_a_removed_attribute_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention_dispatch, "dispatch_attention_fn")
    with pytest.raises(IncompatibleVersionError) as caught:
        apply_context_parallel(nn.Linear(2, 2), ContextParallelConfig())
    missing = "diffusers.models.attention_dispatch has no dispatch_attention_fn, used to replace attention calls"
    for part in (diffusers.__version__, missing, *TESTED["diffusers"], "pip install 'diffusers=="):
        assert part in str(caught.value)


def test_a_strategy_fails_before_any_rank_starts_if_lightning_renames_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in trainer_ddp.DDPStrategy.__mro__:
        if "_configure_launcher" in vars(kind):
            monkeypatch.delattr(kind, "_configure_launcher")
    with pytest.raises(IncompatibleVersionError, match=r"lightning .*DDPStrategy has no _configure_launcher"):
        ContextParallelStrategy()


def test_a_renamed_class_and_a_renamed_module_are_errors() -> None:
    with pytest.raises(IncompatibleVersionError, match=r"torch\.nn\.Gone has no _x, used to test"):
        owner_of(PrivateUse("model", "torch.nn:Gone", "_x", "test"))
    with pytest.raises(IncompatibleVersionError, match="_x, used to test"):
        owner_of(PrivateUse("model", "torch.nn.gone.deeper:Gone", "_x", "test"))


def test_a_package_that_is_not_imported_is_not_imported_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(check.sys.modules, "accelerate", raising=False)
    assert owner_of(PrivateUse("model", "accelerate.hooks:add_hook_to_module", "_hf_hook", "test")) is None
    assert "accelerate" not in check.sys.modules


def test_names_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check_private_uses("model")
    monkeypatch.delattr(attention_dispatch, "dispatch_attention_fn")
    check_private_uses("model")


def test_an_import_error_names_versions_and_what_to_do() -> None:
    with pytest.raises(IncompatibleVersionError) as caught, private_names("torch"):
        from torch.utils._pytree import gone  # noqa: F401
    for part in (
        torch.__version__.split("+")[0],
        "cannot import name 'gone'",
        *TESTED["torch"],
        "pip install 'torch>=",
    ):
        assert part in str(caught.value)


def test_a_package_that_is_not_installed_stays_a_plain_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), private_names("torch"):
        import no_such_package  # noqa: F401


def test_the_original_of_the_trainers_setup_is_the_tested_one() -> None:
    check_unchanged(ModelParallelStrategy.setup, TRAINER_SETUP)
    with pytest.raises(IncompatibleVersionError, match=r"ModelParallelStrategy\.teardown has changed; .* has a copy"):
        check_unchanged(ModelParallelStrategy.teardown, TRAINER_SETUP)


_OF_PYTHON = {"_exit", "_getframe", "_current_frames", "_Unpickler", "_target_"}


def _accessed(tree: ast.Module) -> Iterator[str]:
    """Yield private attributes that are read, set or looked up by `getattr` and `hasattr`."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
                yield name.value


def _defined(tree: ast.Module, *, methods_of_super: bool = True) -> Iterator[str]:
    """Yield the private names that our own classes define: methods, class variables and attributes of `self`."""
    for node in nodes_of(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and methods_of_super:
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "made", "padded"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _called_on_super(tree: ast.Module) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and isinstance(node.value, ast.Call):
            caller = node.value.func
            yield from [node.attr] if isinstance(caller, ast.Name) and caller.id == "super" else []
