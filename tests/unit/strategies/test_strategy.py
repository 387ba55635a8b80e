"""The strategies' shared core in worlds that are only pretended (torch's fake process group)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cp.errors import PlanError
from lightning_cp.fabric import ContextParallelStrategy


@pytest.fixture
def world() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.99])
def test_places_and_samplers_follow_from_the_degrees(size: int, share: float) -> None:
    rank = int(size * share)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    core = ContextParallelStrategy(ring=2, ulysses=4).context
    core.check_world(size)
    groups = core.set_up()
    assert (groups.data_rank, groups.data_size, groups.context_rank) == (rank // 8, size // 8, rank % 8)
    assert groups.ulysses is not None
    assert dist.get_process_group_ranks(groups.ulysses) == list(range(rank - rank % 4, rank - rank % 4 + 4))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("ranks_per_node", "spans"), [(8, False), (4, False), (2, True)])
def test_ulysses_across_nodes_is_pointed_out(ranks_per_node: int, spans: bool) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    core = ContextParallelStrategy(ring=2, ulysses=4).context
    core.set_up()
    line = core.describe([], ranks_per_node=ranks_per_node)
    assert line is not None
    assert line.startswith("8 ranks = data 1 × ring 2 × ulysses 4")
    assert ("ulysses=4 spans 2 nodes of 2 ranks" in line) == spans


def test_a_module_whose_only_transformer_no_plan_can_carry_is_refused_not_repeated_on_every_rank() -> None:
    """Without a word each rank of a context group would run all of it."""
    import diffusers

    unet = type("UNet2DModel", (diffusers.UNet2DModel,), {"__init__": nn.Module.__init__})()
    for modules, reason in ((None, "it is a UNet"), (["0"], "it is a UNet")):
        core = ContextParallelStrategy(ring=2, modules=modules).context
        with pytest.raises(PlanError, match=reason):
            core.wrap(nn.Sequential(unet))
    assert ContextParallelStrategy(ring=1).context.wrap(nn.Sequential(unet)) == []
    assert ContextParallelStrategy(ring=2).context.unused_parameters(nn.Sequential(nn.Linear(2, 2))) is False
