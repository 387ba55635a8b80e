"""Arguments of every class, split over the branches of CFG: merged, the results are those of the whole call."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace as replace_fields
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.engine.apply import installed_on
from lightning_cp.engine.check import KeepFloat64
from lightning_cp.errors import GuidanceError, ShapeError
from lightning_cp.nest import replace, tensors
from lightning_cp.pipelines import cfg_merge, cfg_split, sampling_ranks
from lightning_cp.pipelines.guidance.branches import BranchRunner
from lightning_cp.pipelines.guidance.cfg_samples import is_repeated
from lightning_cp.pipelines.samples import main_argument
from lightning_cp.plans import REGISTERED, patches
from tests.harness import RankPool
from tests.models import FIRST, TINY
from tests.models.tiny import dense_flex_attention

_DEFAULT = ("omnigen", "latte", "minimax_h3", "wan_vace", "hidream_tokens", "z_image", "control_flux_mode")
_WITHOUT_BATCH = [name for name, tiny in TINY.items() if tiny.kind == "Cosmos3OmniTransformer"]
# A batch of one sample, and pictures of different sizes that the class pads together. (Pipelines split no ControlNet.)
_NOT_SPLIT = ("framepack_one_sample", "control_z_image", "control_z_image_unrefined", *_WITHOUT_BATCH)
_SPLIT = [
    name for name in (*_DEFAULT, *list(FIRST.values())[::8]) if not TINY[name].training and name not in _NOT_SPLIT
]


def _call(model: nn.Module, arguments: dict[str, Any]) -> Any:
    with KeepFloat64(), torch.no_grad(), dense_flex_attention():
        return model(**copy.deepcopy(arguments))


def _arguments(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model = TINY[name].build()
    arguments = replace(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, TINY[name].arguments())
    if "return_dict" in inspect.signature(type(model).forward).parameters:
        arguments["return_dict"] = False
    return model, arguments


def _error(rank: int, world: int, name: str) -> float:
    model, arguments = _arguments(name)
    latents, ranks = main_argument(model, (), arguments), sampling_ranks(ContextParallelConfig(), cfg=world)
    mine = cfg_split(arguments, ranks, like=latents)
    assert len(main_argument(model, (), mine)) == 1
    found, whole = _call(model, mine), _call(model, arguments)
    if isinstance(latents, list):  # of different sizes, which cannot be merged
        whole = whole[0][rank : rank + 1]
    else:
        found = cfg_merge(found, ranks, like=latents)
    pairs = [(a, b) for a, b in zip(tensors(whole), tensors(found), strict=True) if a.is_floating_point()]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", list(dict.fromkeys(_SPLIT)))
@pytest.mark.default(len(_DEFAULT))
def test_branches_on_two_ranks_give_the_whole_call(run_ranks: RankPool, name: str) -> None:
    assert max(run_ranks(2, _error, name)) < 1e-12


def _repeated(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """With the same latents for both samples, as pipelines repeat them for guidance."""
    model, arguments = _arguments(name)
    latents = main_argument(model, (), arguments)
    latents[1] = latents[0]
    return model, arguments


def _pipeline_error(rank: int, world: int, name: str, ring: int) -> float:
    """The call of a pipeline's transformer, with two arguments by position."""
    model, arguments = _repeated(name)
    config = ContextParallelConfig(ring_degree=ring)
    calls, whole = BranchRunner("a loop", sampling_ranks(config, cfg=2)), _call(model, arguments)
    apply_context_parallel(model, config)
    installed = installed_on(model)
    assert installed is not None
    names = list(inspect.signature(type(model).forward).parameters)[1:3]
    by_position = tuple(arguments.pop(x) for x in names)
    with KeepFloat64(), torch.no_grad():
        found = calls.call(installed, model, by_position, arguments)
    assert calls.shared == 1
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(whole, found, strict=True))


@pytest.mark.parametrize(("name", "ring"), [("omnigen", 1), ("minimax_h3", 1), ("latte", 3)])
@pytest.mark.default(2)
def test_a_repeated_batch_in_a_pipeline_is_exact(run_ranks: RankPool, name: str, ring: int) -> None:
    assert max(run_ranks(2 * ring, _pipeline_error, name, ring)) < 1e-12


def _packed(rank: int, world: int) -> str:
    model, arguments = _repeated("latte")
    plan = replace_fields(REGISTERED["LatteTransformer3DModel"], patches=patches("image", samples=False))
    apply_context_parallel(model, ContextParallelConfig(), plan)
    installed = installed_on(model)
    assert installed is not None
    with torch.no_grad(), pytest.raises(GuidanceError) as caught:
        BranchRunner("a loop", sampling_ranks(ContextParallelConfig(), cfg=2)).call(installed, model, (), arguments)
    return str(caught.value)


def test_a_plan_whose_samples_cannot_be_divided_is_refused_on_every_rank(run_ranks: RankPool) -> None:
    for text in run_ranks(2, _packed):
        assert "cfg=2 divides the samples of a call, but the plan of LatteTransformer3DModel says" in text
        assert "use cfg=1, and use the ranks for ring or ulysses" in text


def test_ids_of_text_are_not_a_repeated_batch() -> None:
    assert not is_repeated(torch.tensor([7, 7]))
    assert is_repeated(torch.ones(2, 3))


def _refusal(rank: int, world: int, name: str) -> str:
    _, arguments = _arguments(name)
    with pytest.raises(ShapeError) as caught:
        cfg_split(arguments, sampling_ranks(ContextParallelConfig(), cfg=world))
    return str(caught.value)


def test_a_class_without_batch_is_refused_on_every_rank(run_ranks: RankPool) -> None:
    for text in run_ranks(2, _refusal, _WITHOUT_BATCH[0]):
        assert text.startswith("Cosmos 3 computes one sample at a time: call the transformer once per branch")
