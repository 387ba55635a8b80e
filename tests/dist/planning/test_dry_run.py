"""A dry run equals a real step: the exchanges and their bytes, operations and the memory at the peak."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig
from lightning_cp.comm.packet import BUFFERS
from lightning_cp.comm.stats import STATS
from lightning_cp.engine.apply import parallelize
from lightning_cp.engine.recompute import selective_checkpoint
from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.finetune.settings import LoraSettings
from lightning_cp.mesh.groups import groups_for
from lightning_cp.pipelines.pipefusion.stages import blocks_of
from lightning_cp.planning.data_parallel import shard_weights, weights_mesh
from lightning_cp.planning.dry_run import dry_run
from lightning_cp.planning.recording import StepSettings, record_step
from lightning_cp.planning.step import Layout, Start, Step
from tests.harness import RankPool
from tests.models.flux import flux
from tests.models.tiny import Tiny
from tests.models.wan import wan

_TINY = {"flux": flux().but(num_layers=5, num_single_layers=4), "wan": wan().but(num_layers=5)}
_LORA = LoraSettings(rank=2, targets=["to_q", "to_v"])
_LAYOUTS = {
    "ring 2": Layout(ring=2),
    "ring 3 rotated": Layout(ring=3, rotate_method="alltoall"),
    "grid 2 x 2": Layout(ring=4, rotate_method="grid"),
    "ulysses 2": Layout(ulysses=2),
    "2 x 2": Layout(ring=2, ulysses=2),
    "data 2": Layout(data=2, ring=2),
    "sharded": Layout(ring=3, sharded=True),
    "full": Layout(ring=2, checkpointing="full"),
    "selective": Layout(ulysses=3, checkpointing="selective"),
}


def _inputs(tiny: Tiny) -> dict[str, Any]:
    return {
        name: x.to(torch.float32) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in tiny.arguments().items()
    }


def _real(rank: int, world: int, name: str, layout: Layout, task: str, lora: bool) -> tuple[Step, int, int]:
    model = _TINY[name].make()
    if lora:
        add_lora(model, _LORA)
    if layout.checkpointing == "full":
        model.enable_gradient_checkpointing()
    elif layout.checkpointing == "selective":
        model.enable_gradient_checkpointing(gradient_checkpointing_func=selective_checkpoint)
    model.train(task == "train")
    config = ContextParallelConfig(
        ring_degree=layout.ring, ulysses_degree=layout.ulysses, rotate_method=layout.rotate_method
    )
    groups = groups_for(config)
    installed = parallelize(model, config, check_peers="off", groups=groups)
    if layout.sharded:
        shard_weights(model, installed, weights_mesh(groups, task), task)
    before = STATS.collectives, STATS.sent_bytes
    BUFFERS.forget()
    step = record_step(
        model,
        _inputs(_TINY[name]),
        layout,
        groups,
        StepSettings(task),  # type: ignore[arg-type]
        weights=list(model.parameters()),
        repeats={model.get_submodule(path): 1 for path in blocks_of(installed)},
    )
    return step, STATS.collectives - before[0], STATS.sent_bytes - before[1]


_CASES = [
    ("wan", "ring 3 rotated", "sample", False),
    ("flux", "data 2", "train", True),
    ("wan", "sharded", "train", True),
]
_ADAPTED = ("data 2", "sharded")  # the same layouts without LoRA send more of the same
_CASES += [
    ("flux" if i % 2 else "wan", name, "train", False) for i, name in enumerate(_LAYOUTS) if name not in _ADAPTED
]
_CASES += [("flux", "sharded", "sample", False)]


@pytest.mark.parametrize(("name", "layout_name", "task", "lora"), _CASES)
@pytest.mark.full
def test_a_dry_run_equals_a_step(run_ranks: RankPool, name: str, layout_name: str, task: str, lora: bool) -> None:
    layout = _LAYOUTS[layout_name]
    found = run_ranks(layout.ranks, _real, name, layout, task, lora)
    inputs = {key: x.to("meta") if isinstance(x, Tensor) else x for key, x in _inputs(_TINY[name]).items()}
    for rank, (step, collectives, sent_bytes) in enumerate(found):
        for every_block in (True, False) if rank == 1 else (False,):
            dry = dry_run(
                _TINY[name].make,
                inputs,
                layout,
                StepSettings(task),  # type: ignore[arg-type]
                rank=rank,
                dtype=torch.float32,
                adapt=partial(add_lora, settings=_LORA) if lora else None,
                every_block=every_block,
            )
            starts = [x for x in dry.events() if isinstance(x, Start) and x.link not in ("world", "weights")]
            assert len(starts) == collectives
            assert sum(x.sent_bytes for x in starts) == sent_bytes
            assert dry.sent_bytes() == step.sent_bytes()
            # gloo's thread frees what it has sent a moment after the wait, which shows where keys rotate
            if layout.sharded or layout.rotate_method == "alltoall":
                assert dry.peak_bytes == pytest.approx(step.peak_bytes, rel=0.01)
            else:
                assert dry.peak == step.peak
            if not layout.sharded:
                assert dry.flops == step.flops
                assert dry.calls == pytest.approx(step.calls, rel=0.01)
