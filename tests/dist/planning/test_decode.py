"""The decode of a VAE that ranks share: a dry run equals real ranks in its exchanges and its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cp import ContextParallelConfig
from lightning_cp.comm.packet import BUFFERS
from lightning_cp.comm.stats import STATS
from lightning_cp.device_profile import CPU
from lightning_cp.mesh.groups import groups_for
from lightning_cp.planning.components import Component, dry_run_component, record_call
from lightning_cp.planning.step import Start, Step
from tests.harness import RankPool
from tests.harness.cases import full_unless
from tests.pipelines import vaes, vaes_video

_VAES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "wan": (vaes_video.wan, (1, 4, 3, 12, 8)),
    "kl": (lambda: vaes.kl(4, levels=2), (1, 4, 18, 9)),
}


def _real(rank: int, world: int, name: str) -> tuple[Step, int, int]:
    make, shape = _VAES[name]
    groups = groups_for(ContextParallelConfig(ring_degree=world))
    before = STATS.collectives, STATS.sent_bytes
    BUFFERS.forget()
    step = record_call(make(), "decode", {"z": torch.randn(shape)}, groups)
    return step, STATS.collectives - before[0], STATS.sent_bytes - before[1]


@pytest.mark.parametrize(
    ("name", "ranks"), full_unless(lambda *_: False, [(name, ranks) for name in _VAES for ranks in (2, 3)])
)
def test_a_dry_decode_equals_a_decode(run_ranks: RankPool, name: str, ranks: int) -> None:
    make, shape = _VAES[name]
    component = Component("vae", "decode", make().to("meta"), {"z": torch.empty(shape, device="meta")}, "decode")
    for rank, (step, collectives, sent_bytes) in enumerate(run_ranks(ranks, _real, name)):
        dry = dry_run_component(component, ranks, device=CPU, dtype=torch.float32, rank=rank)
        starts = [x for x in dry.events() if isinstance(x, Start)]
        assert len(starts) == collectives
        assert sum(x.sent_bytes for x in starts) == sent_bytes
        assert dry.peak_bytes == pytest.approx(step.peak_bytes, rel=0.01)
        assert dry.flops == step.flops
