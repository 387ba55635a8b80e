"""Pipelines whose forwards run in CUDA graphs, on several ranks with a stand-in: the bits of eager forwards."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, parallelize_pipeline, unparallelize_pipeline
from lightning_cp.engine.graphs import recorder
from lightning_cp.errors import CallFailedError, PeerMismatchError
from lightning_cp.pipelines import parallel_pipeline
from tests.dist.pipelines.test_pipeline_features import _lora
from tests.harness import RankPool
from tests.harness.recorder import StandIn
from tests.models.modes import MODES
from tests.pipelines import PIPES


def _draw(pipe: Any, name: str = "flux", **changed: Any) -> Tensor:
    return PIPES[name].draw(pipe, **{"num_inference_steps": 5, **changed})


def _parallelize(pipe: Any, config: Any, stand_in: StandIn | None = None, **settings: Any) -> StandIn:
    stand_in = stand_in or StandIn()
    with mock.patch.object(recorder, "recorder_for", return_value=stand_in):
        parallelize_pipeline(pipe, config, graphs=True, **settings)
    return stand_in


def _results(rank: int, world: int, name: str, mode: str, cfg: int, change: str) -> tuple[int, int, int]:
    """Compare two calls with graphs and without. Returns: number of captures, of replays, and of graphs."""
    pipe, config = PIPES[name].pipe(), MODES[mode](world // cfg)
    settings: dict[str, Any] = {"stages": "offload"} if change == "offload" else {}
    others: dict[str, Any] = {"joint_attention_kwargs": {"scale": 0.5}} if change == "lora" else {}
    if change == "lora":
        _lora(pipe)
    if change == "compiled blocks":
        pipe.transformer.compile_repeated_blocks(backend="aot_eager")
    if change == "data groups":
        config = ContextParallelConfig(ring_degree=2)
    if change == "whole, compiled":
        pipe.transformer.compile(backend="aot_eager")
    expected = []
    for graphs in (False, True):
        if graphs:
            stand_in = _parallelize(pipe, config, cfg=cfg, **settings)
        else:
            parallelize_pipeline(pipe, config, cfg=cfg, **settings)
        state = parallel_pipeline(pipe)
        assert state is not None
        for call in range(2):
            prompt = "another prompt" if state.ranks.data_rank else "a red cat"
            drawn = _draw(pipe, name, seed=7 + call, prompt=prompt, **others)
            if graphs:
                assert torch.equal(drawn, expected[call])
            expected.append(drawn)
        count = sum(one.num_graphs for one in state.graphs.values())
        unparallelize_pipeline(pipe)
    assert stand_in.freed == stand_in.captures, "all memory is freed"
    return stand_in.captures, stand_in.replays, count


CASES = [  # pipeline, ranks, mode, cfg, what is special
    ("flux", 3, "ring", 1, ""),
    ("flux", 2, "rotation", 1, "lora"),
    ("wan", 2, "ring", 2, ""),
    ("flux", 3, "ulysses", 1, "compiled blocks"),
    ("flux", 3, "ulysses", 1, "whole, compiled"),
    ("flux", 4, "ring", 1, "data groups"),
    ("flux", 2, "ring", 1, "offload"),
    ("sd3", 4, "ring", 2, ""),
    ("wan_two_experts", 2, "ulysses", 1, ""),
]


@pytest.mark.parametrize(("name", "world", "mode", "cfg", "change"), CASES)
@pytest.mark.default(1)
def test_graphs_give_the_bits_of_eager_forwards(
    run_ranks: RankPool, name: str, world: int, mode: str, cfg: int, change: str
) -> None:
    counts = run_ranks(world, _results, name, mode, cfg, change)
    assert all(captures and replays > captures and count for captures, replays, count in counts)


def _journey(rank: int, world: int) -> list[Any]:
    """Calls after which something differs on one rank only, or changes on all."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_cp").addHandler(handler)
    pipe, found = PIPES["flux"].pipe(), list[Any]()
    config = ContextParallelConfig(ring_degree=world)
    parallelize_pipeline(pipe, config)
    expected = _draw(pipe)
    unparallelize_pipeline(pipe)

    stand_in = StandIn()
    if rank == 1:
        stand_in.fails = RuntimeError("out of memory")
    _parallelize(pipe, config, stand_in)
    assert torch.equal(_draw(pipe), expected)
    assert stand_in.captures == stand_in.freed == (rank != 1), "all go on in eager, logged"
    assert any("out of memory" in text or "on rank 1" in text for text in messages) == (rank == 0)
    unparallelize_pipeline(pipe)

    stand_in = _parallelize(pipe, config)
    assert torch.equal(_draw(pipe), expected)
    assert stand_in.captures == 1
    if rank == 1:  # the values are the same
        weight = pipe.transformer.proj_out.weight
        weight.data = weight.data.clone()
    assert torch.equal(_draw(pipe), expected)
    assert (stand_in.captures, stand_in.freed) == (2, 1), "all ranks drop the graph, and capture it again"

    def other_latents(_: Any, step: int, time: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"latents": kwargs["latents"] + (rank == 1 and step == 2)}

    with pytest.raises((PeerMismatchError, CallFailedError)) as error:
        _draw(pipe, callback_on_step_end=other_latents)
    found.append(str(error.value))
    replays = stand_in.replays
    assert torch.equal(_draw(pipe), expected)
    assert stand_in.replays == replays + 5, "the graph is still valid"
    unparallelize_pipeline(pipe)
    return found


@pytest.mark.full
def test_what_one_rank_does_differently_is_noticed_by_all(run_ranks: RankPool) -> None:
    for found in run_ranks(3, _journey):
        assert "hidden_states differ" in found[0] or "latents" in found[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"graphs=True needs a GPU, but this rank samples on cpu: use graphs='auto' or False"),
        ({"graphs": "yes"}, r"graphs='yes' must be True, False or 'auto'"),
        ({"patches": 2}, r"graphs=True cannot be combined with pipe or patches"),
        ({"shard": ["transformer"]}, r"graphs=True and shard=\['transformer'\]"),
    ],
)
def test_settings_that_cannot_be_combined(settings: dict[str, Any], message: str) -> None:
    pipe = PIPES["flux"].pipe()
    with pytest.raises(ValueError, match=message):
        parallelize_pipeline(pipe, ContextParallelConfig(), **{"graphs": True, **settings})
    parallelize_pipeline(pipe, ContextParallelConfig(), graphs="auto")
    unparallelize_pipeline(pipe)
