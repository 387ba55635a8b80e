"""Activation offload in training: the gradients of full checkpointing, bit for bit, with every strategy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from lightning_cp.comm.background import SideStream
from lightning_cp.engine import recompute
from lightning_cp.engine.recompute import OffloadCheckpoint, checkpoint_blocks
from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from tests.dist.engine.test_engine_features import _with_lora
from tests.dist.lightning_ranks import fabric_of, whole
from tests.dist.strategies.test_sharded import ARGUMENTS
from tests.harness import RankPool
from tests.models.wan import wan

pytestmark = pytest.mark.filterwarnings("ignore")


def _gradients(rank: int, world: int, kind: str, settings: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Gradients of two accumulated micro-batches, the first of two forwards, and the number of copies."""
    degrees = {name: value for name, value in settings.items() if name not in ("sharded", "lora")}
    strategy = (ContextParallelFSDPStrategy if settings.get("sharded") else ContextParallelStrategy)(**degrees)
    fabric = fabric_of(rank, world, strategy)
    torch.manual_seed(0)
    model: Any = wan().build().float().train()
    if settings.get("lora"):
        model.requires_grad_(False)
        _with_lora(model)
        model.float()
    with (
        mock.patch.object(recompute, "OffloadCheckpoint", return_value=OffloadCheckpoint(256)),
        mock.patch.object(SideStream, "copy", autospec=True, side_effect=SideStream.copy) as copies,
    ):
        checkpoint_blocks(model, kind)
        wrapped = fabric.setup(model)
        share = 2 // strategy.data_size
        given = {name: x[strategy.data_rank * share :][:share] for name, x in ARGUMENTS.items()}
        for half in range(2):
            with fabric.no_backward_sync(wrapped, enabled=half == 0):
                loss = wrapped(**given, return_dict=False)[0].square().mean()
                if half == 0:
                    loss = loss + wrapped(**given, return_dict=False)[0].mean()
                fabric.backward(loss)
    gradients = [whole(p.grad).flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients), copies.call_count


@pytest.mark.parametrize(
    ("world", "settings"),
    [(4, {"ring": 2}), (3, {"ring": 3, "sharded": True, "lora": True})],
    ids=["DDP and ring", "FSDP2, ring of 3, LoRA"],
)
@pytest.mark.full
def test_gradients_are_those_of_full_checkpointing(run_ranks: RankPool, world: int, settings: dict[str, Any]) -> None:
    full = run_ranks(world, _gradients, "full", settings, init=False)
    offloaded = run_ranks(world, _gradients, "offload", settings, init=False)
    for (expected, none), (found, copies) in zip(full, offloaded, strict=True):
        assert none == 0
        assert copies >= 2 * 3 * 2, "two blocks, three forwards, both directions"
        assert torch.equal(found, expected)
        assert expected.norm() > 0
