"""Which modules FSDP2 shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.compat import versions
from lightning_cp.engine.apply import installed_on
from lightning_cp.finetune.quantize import QuantizedLinear
from lightning_cp.strategies.fsdp import _check_unit
from lightning_cp.strategies.fsdp_units import find_fsdp_units, frozen_children
from tests.models import TINY as MODELS
from tests.models.controlnets import TINY as CONTROLNETS


class _Metrics(nn.Module):
    """A layer, metrics and a list of blocks, as children of a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(2, 2), MeanMetric()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_metrics_of_torchmetrics_hide_no_child_that_trains() -> None:
    module = _Metrics()
    frozen = frozen_children(module, [])
    assert {*frozen} == {module.mean, module.frozen}
    assert find_fsdp_units(module, [], frozen, by_child=True) == [*module.blocks, module.layer]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by_child", [False, True])
def test_a_controlnet_and_its_transformer_are_units(by_child: bool) -> None:
    """A pipeline that samples during training calls them without the forward of their parent."""
    control, base = CONTROLNETS["control_flux"].build(), MODELS["flux"].build()
    both = nn.ModuleDict({"base": base, "control": control})
    installed = []
    for model in (base, control):
        apply_context_parallel(model, ContextParallelConfig())
        one = installed_on(model)
        assert one is not None
        installed.append(one)
    parent = nn.Sequential(both)
    units = find_fsdp_units(parent, installed, [], by_child=by_child)
    assert {base, control} <= {*units}
    for unit in units:  # inner ones first
        assert all(units.index(inner) <= units.index(unit) for inner in unit.modules() if inner in units)
    alone = find_fsdp_units(nn.Sequential(base), installed[:1], [], by_child=False)
    assert base not in alone, "a single transformer is sharded with its parent"


def test_quantised_weights_are_refused_where_fsdp2_cannot_shard_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = QuantizedLinear(nn.Linear(4, 4), "int8")
    for version in ("2.12.0", "2.14.1+cpu", "3.0", "(unknown version)"):
        monkeypatch.setattr(versions, "installed_version", lambda _, found=version: found)
        _check_unit(layer, without=set())
    monkeypatch.setattr(versions, "installed_version", lambda _: "2.11.0+cu130")
    _check_unit(layer, without={layer.packed})
    with pytest.raises(
        ValueError, match=r"packed is quantised .*torch 2\.11\.0\+cu130 .*install torch 2\.12 .*strategy cp"
    ):
        _check_unit(layer, without=set())
    layer.packed = nn.Parameter(torch.zeros(2), requires_grad=False)
    _check_unit(layer, without=set())
