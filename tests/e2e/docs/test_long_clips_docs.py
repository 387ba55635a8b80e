"""The script of docs/long_clips.md for your own module gives the loss and the gradients of the whole output."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.engine.sharding.late_gather import LateGather
from lightning_cp.fabric import ContextParallelStrategy
from tests.dist.compare import nothing_narrowed
from tests.dist.lightning_ranks import fabric_of
from tests.e2e.recipe import ROOT
from tests.harness import RankPool
from tests.models.wan import wan


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _run_page(rank: int, world: int) -> tuple[float, float, bool]:
    """Relative errors of loss and gradients; True if the output was on shards."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/long_clips.md").read_text(), re.DOTALL)
    strategy = ContextParallelStrategy(ring=world)
    fabric = fabric_of(rank, world, strategy, precision="64-true")
    model, arguments, generator = wan().build(), wan().arguments(), torch.Generator().manual_seed(0)
    clean, noise, mask = (
        torch.rand(arguments["hidden_states"].shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    names: dict[str, Any] = {
        "strategy": strategy,
        "noisy": arguments["hidden_states"],
        "t": arguments["timestep"],
        "text": arguments["encoder_hidden_states"],
        **{"clean": clean, "noise": noise, "mask": mask},
    }
    with nothing_narrowed():
        errors = (model(**arguments, return_dict=False)[0] - (noise - clean)).square() * mask
        expected_loss = (errors.flatten(1).sum(1) / mask.flatten(1).sum(1)).mean()
        torch.autograd.backward(expected_loss)
        expected = _gradients(model)
        model.zero_grad()
        names["transformer"] = fabric.setup(model)
        exec(script, names)
        fabric.backward(names["loss"])
        found = _gradients(model)
    error = float((found - expected).norm() / expected.norm())
    return abs(float(names["loss"]) / float(expected_loss) - 1), error, isinstance(names["output"], LateGather)


def test_the_script_for_an_own_module_has_the_loss_and_gradients_of_one_process(run_ranks: RankPool) -> None:
    for loss_error, error, on_shards in run_ranks(3, _run_page):
        assert loss_error < 1e-12
        assert error < 1e-12
        assert on_shards
