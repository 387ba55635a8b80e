"""Equal compiled blocks share one graph for each length, in every mode, and their gradients are exact."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_cp import apply_context_parallel
from tests.dist.compare import averaged, outcome, worst
from tests.harness import RankPool
from tests.models.flux import flux
from tests.models.modes import MODES

KINDS = 2  # FLUX has double and single blocks
TEXTS = (7, 5, 7)  # two lengths


def _counted(rank: int, world: int, mode: str, samples: int, backend: str) -> tuple[list[int], float]:
    """Graphs after each forward and backward, and the largest error of outputs and gradients."""
    torch.compiler.reset()
    tiny = flux()
    reference = replace(tiny, config={**tiny.config, "num_layers": 3, "num_single_layers": 3}).build()
    model = copy.deepcopy(reference)
    if world > 1:
        apply_context_parallel(model, MODES[mode](world))
    if mode == "replay":
        model.enable_gradient_checkpointing()
    counter = CompileCounterWithBackend(backend)
    model.compile_repeated_blocks(backend=counter, fullgraph=True, dynamic=False)
    graphs, largest = [], 0.0
    for text in TEXTS:
        arguments = _first(flux(text).arguments(), samples)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the compiler's
            (expected, gradients), (out, found) = outcome(reference, arguments), outcome(model, arguments)
        averaged(found, world)
        largest = max(largest, float((out - expected).abs().max()), worst(found, gradients))
        graphs.append(counter.frame_count)
    return graphs, largest


def _first(arguments: dict[str, Any], samples: int) -> dict[str, Any]:
    return {name: x if "ids" in name else x[:samples] for name, x in arguments.items()}


@pytest.mark.parametrize(("mode","samples"), [("ring", 1), ("ring", 2), ("rotation",2),("ulysses", 1), ("replay", 1)])
@pytest.mark.parametrize("world", [2])
def test_equal_blocks_share_one_graph_for_each_length(run_ranks: RankPool, world: int, mode: str, samples: int) -> None:
    for graphs, error in run_ranks(world, _counted, mode, samples, "aot_eager"):
        print(graphs, error)
        assert error < 1e-6
        assert graphs == [KINDS, 2 * KINDS, 2 * KINDS]
