"""Optimizers and weights that FSDP2 cannot take: one error before the first step, and before anything is sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import LBFGS, Adafactor, Muon, Rprop

from tests.dist.lightning_ranks import STRATEGIES, fabric_of
from tests.harness import RankPool

CASES: dict[str, tuple[Any, int, str]] = {  # optimizer, rows, error at three ranks
    "adafactor": (Adafactor, 6, "PyTorch's Adafactor does not take sharded weights: use AdamW, or strategy cp"),
    "rprop": (Rprop, 6, "PyTorch's Rprop does not take sharded weights"),
    "lbfgs": (LBFGS, 5, "LBFGS needs equal shards, and the rows of a weight (5, 3) do not divide by 3 ranks"),
    "muon": (Muon, 2, "Muon needs as many rows as ranks, and a weight (2, 3) is sharded over 3"),
    "lbfgs, equal shards": (LBFGS, 6, ""),
    "muon, enough rows": (Muon, 4, ""),
}


def _refused(rank: int, world: int) -> list[str]:
    strategy = STRATEGIES["fabric", "cp_fsdp"](ring=world)
    fabric = fabric_of(rank, world, strategy)
    said = []
    for make, rows, _ in CASES.values():
        model = nn.Linear(3, rows, bias=False)
        try:
            fabric.setup(model, make(model.parameters()))
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="temperature has no dim, and FSDP2 cannot shard it"):
        fabric.setup_module(model)
    assert not any(isinstance(inner, FSDPModule) for inner in model.modules())
    return said


@pytest.mark.filterwarnings("ignore")
def test_what_takes_no_sharded_weights_is_refused_before_the_first_step(run_ranks: RankPool) -> None:
    for said in run_ranks(3, _refused, init=False):
        for (_, _, expected), message in zip(CASES.values(), said, strict=True):
            assert message.startswith(expected)
            assert bool(message) is bool(expected)
