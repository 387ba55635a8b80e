"""Batches with many text lengths and sizes need few graphs under compiled blocks, and have the loss of eager blocks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.families import Facts, StoredBatch, collate, family_for, load_family
from lightning_cp.objectives import objective_for
from tests.dist.compare import averaged, worst
from tests.families.cases import made
from tests.harness import RankPool

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.full]  # 10 to 30 s each
TEXTS = (5, 30, 9, 13, 22, 7, 17, 28, 11, 3, 26)
LENGTHS = (8, 16, 32)
SIZES = ((6, 10), (4, 12), (8, 6), (4, 8))
Given = tuple[nn.Module, Facts]


@dataclass(frozen=True)
class Found:
    """Number of graphs after each batch, and the largest errors of losses and of the last batch's gradients."""

    graphs: list[int]
    loss: float
    gradients: float


@pytest.fixture(scope="module")
def qwen_image() -> Given:
    pipe = made("qwen_image")
    return copy.deepcopy(pipe.transformer).double().train(), family_for(pipe).facts


def _batches(facts: Facts, texts: Sequence[int], sizes: Sequence[tuple[int, int]], fixed: bool) -> list[StoredBatch]:
    """Batches of two samples, the second with a shorter text."""
    draw, batches = torch.Generator().manual_seed(0), []
    for i, length in enumerate(texts):
        shape = (4, 1, *sizes[i % len(sizes)])
        samples = [
            {
                "latents": torch.randn(shape, generator=draw),
                "latents_std": torch.rand(shape, generator=draw),
                "prompt_embeds": torch.randn(n, 16, generator=draw, dtype=torch.float64),
            }
            for n in (length, max(length - 2, 1))
        ]
        text = load_family("qwen_image", facts).text
        batches.append(collate(samples, text, lengths=LENGTHS if fixed else ()))
    return batches


def _trained(
    rank: int,
    world: int,
    given: Given,
    texts: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    fixed: bool,
    dynamic: bool | None,
) -> Found:
    """Run forward and backward of every batch in eager blocks on one rank, then in compiled blocks on all."""
    reference, facts = given
    family, batches = load_family("qwen_image", facts), _batches(facts, texts, sizes, fixed)
    objective = objective_for(family, seed=1)
    model = copy.deepcopy(reference)
    if world > 1:
        apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    counter = CompileCounterWithBackend("aot_eager")
    model.compile_repeated_blocks(backend=counter, fullgraph=True, dynamic=dynamic)  # type: ignore[operator]
    graphs, errors, gradients = [], [], []
    for step, batch in enumerate(batches):
        losses = []
        for module in (reference, model):
            module.zero_grad(set_to_none=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the compiler's, of diffusers' code
                loss = objective.loss(module, family, batch, step=step, first_index=0)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        graphs.append(counter.frame_count)
        errors.append(abs(losses[1] - losses[0]) / losses[0])
    for module in (model, reference):  # compiled blocks give 0 to parameters that eager blocks do not reach
        gradients.append(
            {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}
        )
    if world > 1:
        averaged(gradients[0], world)
    return Found(graphs, max(errors), worst(*gradients))


def _run(run_ranks: RankPool, world: int, given: Given, *, texts: Sequence[int] = TEXTS, **settings: object) -> Found:
    """Results of the rank with the most graphs, after a check of every rank's errors."""
    values = (settings.get("sizes", SIZES[:1]), settings["fixed"], settings.get("dynamic"))
    every = run_ranks(world, _trained, given, texts, *values, timeout_s=300)
    for found in every:
        assert found.loss < 1e-6
        assert found.gradients < 1e-4
    return max(every, key=lambda found: found.graphs[-1])


def test_fixed_lengths_need_one_graph_each(qwen_image: Given, run_ranks: RankPool) -> None:
    found = _run(run_ranks, 1, qwen_image, fixed=True, dynamic=False)
    assert found.graphs[-1] == len(LENGTHS)


def test_fixed_lengths_bound_the_graphs_of_context_parallel_blocks(qwen_image: Given, run_ranks: RankPool) -> None:
    found = _run(run_ranks, 3, qwen_image, fixed=True, dynamic=False)
    assert found.graphs[5] == found.graphs[-1] == len(LENGTHS), found.graphs


@pytest.mark.parametrize(("ring", "sizes"), [(1, SIZES[:1]), (3, SIZES)])
def test_dynamic_shapes_need_three_graphs_for_all_lengths(
    ring: int, sizes: Sequence[tuple[int, int]], qwen_image: Given, run_ranks: RankPool
) -> None:
    """Longer than one token on each rank: torch compiles sizes of 1 as constants."""
    texts = [n for n in TEXTS if n >= 2 * ring]
    found = _run(run_ranks, ring, qwen_image, texts=texts, fixed=False, sizes=sizes)
    assert found.graphs[1] == found.graphs[-1] == 3, found.graphs


def test_static_shapes_without_fixed_lengths_need_a_graph_for_each(qwen_image: Given, run_ranks: RankPool) -> None:
    found = _run(run_ranks, 1, qwen_image, texts=TEXTS[:4], fixed=False, dynamic=False)
    assert found.graphs == [1, 2, 3, 4]


def test_sizes_bound_the_graphs_of_context_parallel_blocks(qwen_image: Given, run_ranks: RankPool) -> None:
    found = _run(run_ranks, 3, qwen_image, texts=(7, 5, 8, 6, 7, 5, 8, 6), fixed=True, dynamic=False, sizes=SIZES[:2])
    assert found.graphs[3] == found.graphs[-1] == 2, found.graphs


def _deep(rank: int, world: int, facts: Facts) -> tuple[float, int]:
    """Loss of 12 compiled blocks relative to eager blocks, and the number of graphs."""
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    config = {**dict(made("qwen_image").transformer.config), "num_layers": 12}
    reference = QwenImageTransformer2DModel.from_config(config).double().train()
    model = copy.deepcopy(reference)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    counter = CompileCounterWithBackend("aot_eager")
    model.compile_repeated_blocks(backend=counter, fullgraph=True)
    family, (batch,) = load_family("qwen_image", facts), _batches(facts, TEXTS[:1], SIZES[:1], fixed=True)
    objective = objective_for(family, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the compiler's, of diffusers' code
        losses = [objective.loss(x, family, batch, step=0, first_index=0).item() for x in (reference, model)]
    return abs(losses[1] - losses[0]) / losses[0], counter.frame_count


def test_many_equal_blocks_share_one_graph(qwen_image: Given, run_ranks: RankPool) -> None:
    for error, graphs in run_ranks(3, _deep, qwen_image[1], timeout_s=300):
        assert error < 1e-6
        assert graphs == 1
