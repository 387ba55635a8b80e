"""Every transformer class of diffusers has a plan, or is refused with a reason."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lightning_cp.plans
from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.errors import PlanError
from lightning_cp.plans import REGISTERED, refusal, registered_plan

_FOLDER = Path(lightning_cp.plans.__file__).parent


def _classes(of: str = "transformers") -> dict[str, type]:
    """All models that diffusers defines in a folder."""
    from diffusers import ModelMixin

    folder = import_module(f"diffusers.models.{of}")

    found = {}
    for info in pkgutil.iter_modules(folder.__path__):
        module = import_module(f"{folder.__name__}.{info.name}")
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__ and issubclass(kind, ModelMixin):
                found[name] = kind
    return found


def test_every_class_of_diffusers_has_a_plan_or_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # set by what some of diffusers' modules import
    classes = _classes()
    assert len(classes) >= 75
    neither = [name for name, kind in classes.items() if not registered_plan(kind) and not refusal(kind)]
    both = [name for name, kind in classes.items() if name in REGISTERED and refusal(kind)]
    assert neither == []
    assert both == []


def test_every_plan_belongs_to_a_class_of_diffusers() -> None:
    assert set(REGISTERED) <= {*_classes(), *_classes("controlnets")}


def test_no_class_has_two_plans() -> None:
    tables = [
        import_module(f"lightning_cp.plans.{info.name}")
        for info in pkgutil.iter_modules([str(_FOLDER)])
        if hasattr(import_module(f"lightning_cp.plans.{info.name}"), "PLANS")
    ]
    assert sum(len(table.PLANS) for table in tables) == len(REGISTERED)


@pytest.mark.parametrize("file", sorted(_FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_family_is_a_short_file_of_data(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if "\nPLANS" in text:
        assert len(text.splitlines()) <= 100
        assert text.count("\ndef ") <= 1
        assert "lambda" not in text


@pytest.mark.parametrize("folder", ["engine", "pipelines"])
def test_no_file_of_the_engine_or_of_pipelines_knows_a_models_name(folder: str) -> None:
    names = {name.removesuffix("Model").removesuffix("2D").removesuffix("3D") for name in REGISTERED}
    if folder == "pipelines":  # nor that of a family
        names |= {"AuraFlow", "Cosmos", "Flux", "HiDream", "Hunyuan", "LTX", "Latte", "Lumina", "MiniMax", "OmniGen"}
        names |= {"PixArt", "Qwen", "SD3", "Sana", "Wan"}
    for file in (_FOLDER.parent / folder).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not [name for name in names if re.search(rf"\b{name}(?![a-z])", text)], file.name


def test_all_classes_with_the_argument_that_marks_a_batch_have_this_batch() -> None:
    """Calls are recognised by this argument."""
    plans = {kind: plan for kind in _classes().values() if (plan := registered_plan(kind)) is not None}
    markers = {plan.batch.marker: plan.batch for plan in plans.values() if plan.batch is not None}
    assert len(markers) == 6
    for kind, plan in plans.items():
        arguments: Any = inspect.signature(getattr(kind, "forward")).parameters  # noqa: B009
        assert [markers[name] for name in arguments if name in markers] == [plan.batch] * (plan.batch is not None), kind


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("UNet2DConditionModel", "UNet"),
        ("Transformer2DModel", "GroupNorm"),
        ("PriorTransformer", "nothing to share"),
        ("SanaWMTransformer3DModel", "SanaVideoTransformer3DModel is supported"),
    ],
)
def test_a_class_that_no_plan_can_carry_is_refused_with_what_is_special(name: str, reason: str) -> None:
    import diffusers

    model = nn.Module()
    model.__class__ = type(name, (getattr(diffusers, name),), {"__init__": nn.Module.__init__})
    with pytest.raises(PlanError, match=reason) as caught:
        apply_context_parallel(model, ContextParallelConfig())
    for hint in ("ring=1, ulysses=1", "docs/plans.md", "check_plan"):
        assert hint in str(caught.value)


def test_parts_of_a_vae_are_no_unet() -> None:
    from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2D

    assert refusal(UNetMidBlock2D) is None


def test_an_unknown_class_is_refused_with_a_link_to_writing_a_plan() -> None:
    with pytest.raises(PlanError, match=r"no plan is registered for .*docs/plans\.md.*check_plan"):
        apply_context_parallel(nn.Linear(2, 2), ContextParallelConfig())
