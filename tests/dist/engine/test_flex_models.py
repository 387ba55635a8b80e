"""Models that call flex attention with block masks: exact across ranks, eager, compiled and checkpointed."""

from __future__ import annotations

import copy
import gc
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from lightning_cp import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    apply_context_parallel,
    remove_context_parallel,
)
from lightning_cp.engine.recompute import selective_checkpoint
from lightning_cp.errors import InterceptionError
from lightning_cp.plans import LOCAL
from tests.dist.compare import averaged, outcome, worst
from tests.dist.engine.flex_model import IMAGE, PLAN, Model, arguments, block_mask, crossing, dense, with_dense_masks
from tests.harness import RankPool
from tests.models.flux import flux

_EXACT = 1e-10


def _error(model: nn.Module, parallel: nn.Module, given: dict[str, Any], world: int) -> float:
    expected, gradients = outcome(model, with_dense_masks(given))
    out, found = outcome(parallel, given)
    return max(float((out - expected).abs().max()), worst(averaged(found, world), gradients))


def _check(rank: int, world: int, ulysses: int, way: str, kv_heads: int, kind: str) -> float:
    config = ContextParallelConfig(ring_degree=world // ulysses, ulysses_degree=ulysses)
    model = Model(way, kv_heads)
    parallel = copy.deepcopy(model)
    apply_context_parallel(parallel, config, PLAN)
    given = arguments(0, kind)
    largest = max(_error(model, parallel, given, world) for _ in range(2))
    with torch.no_grad():
        remove_context_parallel(parallel)
    return largest


@pytest.mark.parametrize(
    ("world", "ulysses", "way", "kv_heads", "kind"),
    [
        (3, 1, "flex", 4, "block mask"),
        (4, 2, "flex", 2, "sparse mask"),
        (3, 3, "compiled", 2, "block mask"),
        (3, 1, "lse", 4, "block mask"),
        (3, 3, "dispatch", 4, "block mask"),
    ],
)
@pytest.mark.default(1)
def test_joint_and_cross_attention_with_block_masks_are_exact(
    run_ranks: RankPool, world: int, ulysses: int, way: str, kv_heads: int, kind: str
) -> None:
    assert max(run_ranks(world, _check, ulysses, way, kv_heads, kind)) < _EXACT


def _compiled(rank: int, world: int, backend: str, hidden: bool) -> tuple[list[int], float]:
    """Graphs after each of three masks, and the largest error. Args: hidden: masks are no arguments of the model."""
    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # dynamo reads it
    counter = CompileCounterWithBackend(backend)
    model = Model()
    parallel = copy.deepcopy(model)
    apply_context_parallel(parallel, ContextParallelConfig(ring_degree=world), PLAN)
    for block in parallel.blocks:
        block.compile(backend=counter, fullgraph=not hidden)
    graphs, largest = [], 0.0
    for shift in range(3):
        given = arguments(shift)
        expected, gradients = outcome(model, with_dense_masks(given))
        if hidden:
            masks = given.pop("mask"), given.pop("cross")
            parallel.run = lambda block, image, text, context, *_, masks=masks: block(image, text, context, *masks)
        out, found = outcome(parallel, given)
        largest = max(largest, float((out - expected).abs().max()), worst(averaged(found, world), gradients))
        graphs.append(counter.frame_count)
    return graphs, largest


@pytest.mark.full
def test_compiled_blocks_share_their_graphs_for_several_masks(run_ranks: RankPool) -> None:
    for graphs, error in run_ranks(3, _compiled, "aot_eager", False):
        assert graphs == [2, 2, 2]  # the first block gets tensors without gradients
        assert error < _EXACT


@pytest.mark.full
def test_compiled_blocks_are_exact_with_masks_that_are_no_arguments(run_ranks: RankPool) -> None:
    assert max(error for _, error in run_ranks(3, _compiled, "eager", True)) < _EXACT


WAYS = {
    "full": lambda block, *args: checkpoint(block, *args, use_reentrant=False),
    "reentrant": lambda block, *args: checkpoint(block, *args, use_reentrant=True),
    "selective": selective_checkpoint,
}


def _checkpointed(rank: int, world: int, way: str, compiled: bool) -> float:
    """The masks of two forwards are dropped before their backward."""
    model = Model()
    expected = [outcome(model, with_dense_masks(arguments(shift))) for shift in range(2)]
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    model.run = WAYS[way]
    if compiled:
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # dynamo reads it
        for block in model.blocks:
            block.compile(backend="aot_eager")
    model.zero_grad(set_to_none=True)
    losses = []
    for shift in range(2):
        given = arguments(shift)
        given["image"].requires_grad_()
        out = model(**given)[0].flatten()
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        losses.append((out * weights).sum())
        del given, out
    gc.collect()
    sum(losses).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return worst(averaged(found, world), {name: expected[0][1][name] + expected[1][1][name] for name in found})


@pytest.mark.parametrize(
    ("way", "compiled"), [("full", False), ("selective", False), ("reentrant", False), ("selective", True)]
)
@pytest.mark.default(2)
def test_checkpoints_replay_with_masks_that_were_dropped(run_ranks: RankPool, way: str, compiled: bool) -> None:
    assert max(run_ranks(3, _checkpointed, way, compiled)) < _EXACT


def _flux(rank: int, world: int) -> float:
    """FLUX with diffusers' backend "flex": a block mask, and a tensor."""
    model = flux().build()
    parallel = copy.deepcopy(model)
    apply_context_parallel(parallel, ContextParallelConfig(ring_degree=world))
    given, tokens = flux().arguments(), 7 + 15
    table = block_mask(lambda b, h, q, k: (q - k).abs() % 5 < 3, tokens, tokens)
    expected = outcome(model, {**given, "joint_attention_kwargs": {"attention_mask": dense(table)[None, None]}})
    largest = 0.0
    for mask in (table, dense(table)[None, None]):
        with attention_backend("flex"):
            out, found = outcome(parallel, {**given, "joint_attention_kwargs": {"attention_mask": mask}})
        largest = max(largest, float((out - expected[0]).abs().max()), worst(averaged(found, world), expected[1]))
    return largest


def test_flux_runs_with_the_backend_flex(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _flux)) < _EXACT


def _message(model: nn.Module, given: dict[str, Any]) -> str:
    with pytest.raises(InterceptionError) as caught:
        model(**given)
    return str(caught.value)


def _refused(rank: int, world: int) -> list[str]:
    config, given, messages = ContextParallelConfig(ring_degree=world), arguments(), []
    unordered = replace(PLAN, attention={"cross": LOCAL})
    wrong = block_mask(crossing, 8, 8)
    for way, plan, changed in (
        ("score_mod", PLAN, {}),
        ("max_scores", PLAN, {}),
        ("flex", unordered, {}),
        ("flex", PLAN, {"mask": wrong}),
        ("flex", PLAN, {"cross": wrong}),
        ("flex", PLAN, {"mask": "causal"}),
    ):
        model = Model(way)
        apply_context_parallel(model, config, plan)
        messages.append(_message(model, {**given, **changed}))
    return messages


def test_what_cannot_be_computed_is_refused_on_every_rank(run_ranks: RankPool) -> None:
    for messages in run_ranks(2, _refused):
        for message, part in zip(
            messages,
            (
                "score_mod, which cannot be computed across ranks",
                "requests max_scores",
                "needs the order of these modalities",
                "the block mask is of (8, 8) queries and keys, but attention has (22, 22)",
                "attention over whole keys has",
                "block_mask is a str",
            ),
            strict=True,
        ):
            assert part in message


def _in_their_format(rank: int, world: int) -> tuple[float, str]:
    """Token counts decide: attention of one modality is exact, of several it is refused."""
    plan = {
        "": {name: ContextParallelInput(1, expected_dims=3) for name in ("image", "text")},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }
    model, given = Model(), arguments()
    parallel = copy.deepcopy(model)
    apply_context_parallel(parallel, ContextParallelConfig(ring_degree=world), plan)
    message = _message(parallel, given)
    given["text"], given["mask"] = given["text"][:, :0], block_mask(crossing, IMAGE, IMAGE)
    return _error(model, parallel, given, world), message


def test_plans_in_diffusers_format_are_exact_or_refused(run_ranks: RankPool) -> None:
    for error, message in run_ranks(3, _in_their_format):
        assert error < _EXACT
        assert "does not describe the order of several modalities" in message
