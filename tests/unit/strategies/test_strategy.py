"""The shared core of the strategies in simulated worlds (torch's fake process group)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cp.errors import PlanError
from lightning_cp.fabric import ContextParallelStrategy
from lightning_cp.strategies.mixin import ContextParallelMixin
from lightning_cp.strategies.settings import StrategySettings
from tests.dist.lightning_ranks import STRATEGIES
from tests.dist.plain import PLAIN_PLAN, Plain


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
    """Without an error, each rank of a context group would run the whole model."""
    import diffusers

    unet = type("UNet2DModel", (diffusers.UNet2DModel,), {"__init__": nn.Module.__init__})()
    for modules, reason in ((None, "it is a UNet"), (["0"], "it is a UNet")):
        core = ContextParallelStrategy(ring=2, modules=modules).context
        with pytest.raises(PlanError, match=reason):
            core.wrap(nn.Sequential(unet))
    assert ContextParallelStrategy(ring=1).context.wrap(nn.Sequential(unet)) == []
    assert ContextParallelStrategy(ring=2).context.unused_parameters(nn.Sequential(nn.Linear(2, 2))) is False


def test_unused_parameters_are_expected_only_where_parts_of_a_module_may_take_turns() -> None:
    context = ContextParallelStrategy(ring=2, plans={Plain: PLAIN_PLAN}).context
    frozen = Plain().requires_grad_(requires_grad=False)
    modules: list[nn.Module] = [nn.Sequential(Plain(), nn.Linear(2, 2)), nn.Sequential(Plain(), frozen)]
    modules += [nn.Sequential(Plain(), Plain()), nn.Sequential(Plain())]
    modules[-1].automatic_optimization = False  # type: ignore[assignment]
    assert [context.unused_parameters(module) for module in modules] == [False, False, True, True]


def test_the_strategies_and_conf_have_the_settings_with_the_same_defaults() -> None:
    """A new setting is declared in three places: StrategySettings, the mixin's signature and conf/."""
    settings = {one.name: one.default for one in fields(StrategySettings)}
    signature = {name: x.default for name, x in inspect.signature(ContextParallelMixin).parameters.items()}
    assert {name: signature[name] for name in settings} == settings
    file = Path(__file__).parents[3] / "conf/lightning_cp/strategy/cp.yaml"
    conf: dict[Any, Any] = dict(OmegaConf.load(file))  # type: ignore[arg-type]
    del conf["_target_"]
    assert conf == {name: settings[name] for name in settings if name not in ("mesh", "plans", "modules")}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"stall_s": 0}, "stall_s=0 must be None or a number more than 0"),
        ({"stall_s": True}, "stall_s=True must be"),
        ({"stall_s": math.nan}, "stall_s=nan must be"),
        ({"check_peers": "no"}, "check_peers='no' must be one of sampled, first, always, off"),
        ({"ring": 0}, "ring=0 must be at least 1"),
        ({"ulysses": 1.5}, "ulysses=1.5"),
        ({"rotate_method": "ring"}, "rotate_method='ring' must be one of allgather, alltoall, grid"),
        ({"kernel": "magic"}, "kernel='magic'"),
        ({"data_parallel": 0}, "data_parallel=0"),
        ({"rings": 2}, "Strategy has no setting 'rings': did you mean 'ring'"),
        ({"plans": ["Plain"]}, r"plans=\['Plain'\] must be a dict"),
        ({"modules": "transformer"}, "modules='transformer' must be a list"),
        ({"replicate": 0}, "replicate=0"),
        ({"bucket_cap_mb": 1}, "bucket_cap_mb"),
    ],
)
def test_a_bad_setting_is_refused_when_the_strategy_is_built(setting: dict[str, Any], message: str) -> None:
    for (_, kind), strategy in STRATEGIES.items():
        if kind == "cp_fsdp" or not {"replicate", "bucket_cap_mb"} & setting.keys():  # DDP takes or passes these
            with pytest.raises((ValueError, TypeError), match=message):
                strategy(**setting)


def test_the_stall_watchdog_can_be_off_or_wait_for_ever() -> None:
    for value in (None, math.inf, 0.5):
        assert ContextParallelStrategy(stall_s=value).context.settings.stall_s == value
