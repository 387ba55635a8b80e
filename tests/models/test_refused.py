"""Modes that a plan refuses are refused by name, with the reason, before anything runs. No ranks needed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.engine.apply import installed_on
from lightning_cp.engine.attention.diffusers_dispatch import kernel_for
from lightning_cp.errors import InterceptionError, ShapeError
from lightning_cp.plans import REGISTERED
from tests.models import FIRST, TINY
from tests.models.table import not_supported

_REFUSED = [(kind, name) for kind, plan in REGISTERED.items() for name in plan.refused]
_REQUIRED = [(kind, name) for kind, plan in REGISTERED.items() for name in plan.required]
_LEADING = [(kind, name) for kind, plan in REGISTERED.items() for name in plan.leading]


def _written_caches() -> dict[str, Any]:
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

    caches = GlmImageKVCache(num_layers=2)
    caches.set_mode("write")
    return {"kv_caches": caches}


_OF_BLOCKS = {"kv_cache.mode": _written_caches}  # arguments of the model that give blocks what is refused


@pytest.fixture(autouse=True)
def _no_trace_of_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # set by what some of diffusers' modules import


def _parallel(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    tiny = TINY[FIRST[kind]]
    model, arguments = tiny.build(), tiny.arguments()
    apply_context_parallel(model, ContextParallelConfig())
    return model, arguments


@pytest.mark.parametrize(("kind", "name"), _REFUSED)
def test_an_argument_that_a_plan_refuses(kind: str, name: str) -> None:
    model, arguments = _parallel(kind)
    argument, _, key = name.partition(".")
    if argument in inspect.signature(type(model).forward).parameters:
        given = {argument: {**(arguments.get(argument) or {}), key: 1} if key else 1}
    else:
        given = _OF_BLOCKS[name]()
    with pytest.raises(ShapeError) as caught:
        model(**{**arguments, **given})
    assert f"{name}=" in str(caught.value)
    assert REGISTERED[kind].refused[name] in str(caught.value)


def test_the_page_says_what_is_refused_and_when() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert page.endswith("\n".join(["", *not_supported(), ""])), "write it with the command on the page"


@pytest.mark.parametrize(("kind", "name"), _REQUIRED)
def test_an_argument_that_a_plan_requires(kind: str, name: str) -> None:
    model, arguments = _parallel(kind)
    with pytest.raises(ShapeError, match=f"{name} must be given"):
        model(**{**arguments, name: None})


@pytest.mark.parametrize(("kind", "name"), _LEADING)
@pytest.mark.default(1)
def test_a_mask_that_must_keep_the_first_tokens(kind: str, name: str) -> None:
    model, arguments = _parallel(kind)
    with pytest.raises(ShapeError, match=f"{name} must keep the first tokens"):
        model(**{**arguments, name: arguments[name].flip(1)})


def test_a_backend_that_a_plan_refuses_also_where_the_kernel_is_given() -> None:
    (kind, name), *_ = [(kind, name) for kind, plan in REGISTERED.items() for name in plan.refused_backends]
    model, _ = _parallel(kind)
    installed = installed_on(model)
    assert installed is not None
    installed.session.kernel = "math"
    with pytest.raises(InterceptionError, match=f"'{name}' cannot be used"):
        kernel_for(installed.session, name)
