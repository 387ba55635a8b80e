"""Models in patches: evaluated again with equal inputs, the patches give the plain model's result (the fixed point).

It finds a wrong order of tokens in attention, tokens left out, and keys that belong to no patch.
"""

from __future__ import annotations

import copy
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.engine.check import KeepFloat64
from lightning_cp.engine.installed import Installed, installed_on
from lightning_cp.engine.paths import expand, submodule
from lightning_cp.errors import PlanError, ShapeError
from lightning_cp.nest import tensors
from lightning_cp.pipelines.pipefusion.patches import PatchEvaluation, run_once
from lightning_cp.plans import REGISTERED
from lightning_cp.undoable import undo_all
from tests.harness import RankPool
from tests.harness.cases import in_turn
from tests.models import FIRST, TINY
from tests.models.modes import MODES
from tests.overlapping import outputs_in_patches

_SUPPORTED = [name for name, tiny in TINY.items() if REGISTERED[tiny.kind].patches is not None]
_OF_CLASSES = [name for name in _SUPPORTED if name in FIRST.values()]
_MORE = ("flux_short_text", "hunyuan_video_short_text", "cogvideox_masked", "cogview4_training", "z_image_controlnet")


def _installed(model: nn.Module) -> Installed:
    installed = installed_on(model)
    assert installed is not None
    return installed


def _outputs(model: nn.Module, arguments: dict[str, Any]) -> list[Tensor]:
    with KeepFloat64(), torch.no_grad():
        return [x for x in tensors(model(**copy.deepcopy(arguments))) if x.is_floating_point()]


def _in_patches(model: nn.Module, arguments: dict[str, Any], patches: int, order: tuple[str, ...]) -> list[Tensor]:
    """Evaluate the whole sequence, then the patches; return the outputs of the patches."""
    return _evaluated(model, arguments, PatchEvaluation(_installed(model).session, patches, order))


def _evaluated(model: nn.Module, arguments: dict[str, Any], evaluation: PatchEvaluation) -> list[Tensor]:
    installed = _installed(model)
    undo = run_once(installed)
    with installed.session.evaluating(evaluation):
        for patch in (None, *range(evaluation.patches)):
            evaluation.begin(patch)
            found = _outputs(model, arguments)
    undo_all(undo)
    return found


def _error(expected: list[Tensor], found: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, found, strict=True))


def _parallel(name: str, config: ContextParallelConfig) -> tuple[nn.Module, dict[str, Any], list[Tensor]]:
    model, arguments = TINY[name].build(), {**TINY[name].arguments(), "return_dict": False}
    alone = _outputs(model, arguments)
    apply_context_parallel(model, config)
    return model, arguments, alone


def _order(model: nn.Module) -> tuple[str, ...]:
    patches = _installed(model).model_plan.patches
    assert patches is not None
    return patches.order


def _in_overlapping_steps(name: str, patches: int = 2) -> float:
    """The largest error of patches on stages that know some or none of the latents."""
    model, arguments, alone = _parallel(name, ContextParallelConfig())
    installed = _installed(model)
    with KeepFloat64():
        found = outputs_in_patches(installed, (), arguments, overlaps=True, patches=patches)
    assert _error(alone, found.pop("all latents")) < 1e-12
    return max(_error(alone, outputs) for outputs in found.values())


_WAITING = [kind for kind, plan in REGISTERED.items() if plan.patches is not None and not plan.patches.overlaps]


@contextmanager
def _counts(model: nn.Module, installed: Installed) -> Iterator[Counter[str]]:
    """Count the forwards of the modules that run once; end to remove the hooks."""
    assert installed.model_plan.patches is not None
    counts, handles = Counter[str](), []
    for pattern in installed.model_plan.patches.once:
        with suppress(PlanError):
            for path in expand(model, pattern):
                handles.append(
                    submodule(model, path).register_forward_pre_hook(lambda *_, path=path: counts.update([path]))
                )
    yield counts
    for handle in handles:
        handle.remove()


def _check_once(name: str) -> None:
    """Modules before the blocks run once for all patches; an evaluation with other arguments keeps nothing of it."""
    model, arguments, alone = _parallel(name, ContextParallelConfig())
    installed = _installed(model)
    evaluation = PatchEvaluation.of(installed.session, 3)
    with _counts(model, installed) as plain:
        _outputs(model, arguments)
    with _counts(model, installed) as counts:
        assert _error(alone, _evaluated(model, arguments, evaluation)) < 1e-12
    assert plain
    assert counts == Counter({path: 2 * calls for path, calls in plain.items()})  # the whole sequence, and one patch
    floats = {k for k, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point() and "mask" not in k}
    other = {k: x * 0.7 if k in floats else x for k, x in arguments.items()}
    expected = _outputs(model, other)
    assert _error(alone, expected) > 1e-3
    assert _error(expected, _evaluated(model, other, evaluation)) < 1e-12


@pytest.mark.parametrize("kind", [TINY[name].kind for name in _OF_CLASSES])
@pytest.mark.default("FluxTransformer2DModel", "SanaTransformer2DModel", "HunyuanVideoTransformer3DModel", _WAITING[0])
def test_patches_of_a_class(kind: str) -> None:
    """Where a patch needs its own and earlier latents only, a step may begin before the step before is complete.

    A plan that fails there must say `overlaps=False`, and only such a plan may.
    """
    for name in (name for name in dict.fromkeys((FIRST[kind], *_MORE)) if TINY[name].kind == kind):
        model, arguments, alone = _parallel(name, ContextParallelConfig())
        for patches in (2, 3, 5):
            assert _error(alone, _in_patches(model, arguments, patches, _order(model))) < 1e-12, (name, patches)
        if kind not in _WAITING:
            assert _in_overlapping_steps(name) < 1e-12, name
    if kind in _WAITING:  # Z-Image pads to 32 tokens: several patches need real ones
        assert _in_overlapping_steps(FIRST[kind], patches=5) > 1e-3
    if (plan := REGISTERED[kind].patches) is not None and plan.once:
        _check_once(FIRST[kind])


@pytest.mark.full
def test_every_module_that_runs_once_is_in_a_model() -> None:
    for kind, plan in REGISTERED.items():
        for pattern in () if plan.patches is None else plan.patches.once:
            names = [name for name, tiny in TINY.items() if tiny.kind == kind]
            assert any(_has(TINY[name].build(), pattern) for name in names), (kind, pattern)


def _has(model: nn.Module, pattern: str) -> bool:
    try:
        return bool(expand(model, pattern))
    except PlanError:
        return False


@pytest.mark.full
def test_more_patches_than_text_tokens() -> None:
    model, arguments, alone = _parallel("flux", ContextParallelConfig())  # 7 text tokens, 15 image tokens
    assert _error(alone, _in_patches(model, arguments, 11, _order(model))) < 1e-12


def test_another_order_of_tokens_is_found() -> None:
    for name in ("flux", "sd3"):
        model, arguments, alone = _parallel(name, ContextParallelConfig())
        assert _error(alone, _in_patches(model, arguments, 3, _order(model)[::-1])) > 1e-4


def test_more_patches_than_tokens_raise() -> None:
    model, arguments, _ = _parallel("flux", ContextParallelConfig())
    with pytest.raises(ShapeError, match="fewer than patches=16 x ring=1 x ulysses=1"):
        _in_patches(model, arguments, 16, _order(model))


def test_a_patch_before_the_whole_sequence_raises() -> None:
    model, arguments, _ = _parallel("flux", ContextParallelConfig())
    installed = _installed(model)
    evaluation = PatchEvaluation.of(installed.session, 2)
    evaluation.begin(0)
    with installed.session.evaluating(evaluation), pytest.raises(ShapeError, match="before the whole sequence"):
        _outputs(model, arguments)


def _over_ranks(rank: int, world: int, name: str, mode: str) -> float:
    model, arguments, alone = _parallel(name, MODES[mode](world))
    most = 2 if name.startswith(("sana", "flux3")) else 3  # 7 rows or text tokens for 3 ranks
    return max(_error(alone, _in_patches(model, arguments, patches, _order(model))) for patches in (1, most))


_MODES = [("flux", "ring", 3), ("flux", "ulysses", 3), ("flux", "unified", 4), ("wan", "rotation", 3)]
_MODES += [("sana", "ring", 3), ("cogview4_training", "ulysses", 3), ("ltx2_self_attention_mask", "ulysses", 3)]
_MODES += [("ace_step", "ulysses", 3)]  # a rank with one query of a patch, and a mask with a row for each query
_MODES += [("sd3", "ulysses", 2), ("qwen_image", "ring", 3), ("hunyuan_video_short_text", "ulysses", 3)]
_ALL = [(name, mode, 3) for name, mode in in_turn(_OF_CLASSES[::8], ("ring", "ulysses"))]


@pytest.mark.parametrize(("name", "mode", "world"), list(dict.fromkeys(_MODES + _ALL)))
@pytest.mark.default("flux-ring-3", "ltx2_self_attention_mask", "hunyuan_video_short_text", "ace_step")
def test_patches_over_ranks_give_the_plain_result(run_ranks: RankPool, name: str, mode: str, world: int) -> None:
    assert max(run_ranks(world, _over_ranks, name, mode)) < 1e-12


_TABLE = re.compile(r"(<!-- classes: [^>]*-->\n).*?(<!-- end -->)", re.DOTALL)


def _table() -> str:
    patches = {name: plan.patches for name, plan in sorted(REGISTERED.items()) if plan.patches is not None}
    staged, whole = ([name for name in patches if patches[name].stages == stages] for stages in (True, False))
    return f"\n**With `pipe` and `patches`**: {', '.join(staged)}.\n\n**With `patches` only**: {', '.join(whole)}.\n\n"


def test_the_page_lists_the_classes() -> None:
    page = Path(__file__).parents[2] / "docs" / "sampling.md"
    written = _TABLE.sub(lambda found: found[1] + _table() + found[2], page.read_text())
    if "LIGHTNING_CP_PATCHES_TABLE" in os.environ:
        Path(os.environ["LIGHTNING_CP_PATCHES_TABLE"]).write_text(written)
    assert page.read_text() == written


def test_every_class_says_whether_it_can_be_computed_in_patches() -> None:
    """A variant of a plan is another plan: it must say so itself."""
    for name, plan in REGISTERED.items():
        for variant in (x for x in plan.variants.values() if not isinstance(x, str)):  # a text is a refusal
            assert (variant.patches is None) == (plan.patches is None), name
            assert replace(variant, patches=plan.patches).main == plan.main
