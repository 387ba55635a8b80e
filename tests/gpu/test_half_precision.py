"""float16 with a gradient scaler (`precision="16-mixed"`) at ring 2 x data 2, on ranks that share one GPU."""

from __future__ import annotations

import math
import os
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, default_collate

from lightning_cp import fabric, pytorch
from tests.dist.lightning_ranks import QUIET, everyones
from tests.dist.module import Clips, TrainsWan
from tests.harness import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
ON_GPU: dict[str, Any] = {"accelerator": "cuda", "precision": "16-mixed"}
SCALE = 2.0**10  # PyTorch's default, 2**16, is too large for this model, also in one process
STEPS, OVERFLOWS = 4, 1  # an epoch; the step, from 0, in which a gradient is beyond float16


class _Overflows(TrainsWan):
    """The loss of one step is far too large on the second data rank, and as ever on the first.

    Attributes: weights before each step, gradients as the optimizer sees them, the scale after each step.
    """

    def __init__(self, strategy: Any, scaler: GradScaler | None) -> None:
        super().__init__()
        assert scaler is not None
        scaler.load_state_dict({**scaler.state_dict(), "scale": SCALE})
        self.cp_strategy, self.scaler = strategy, scaler
        self.weights: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.scales: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss * 2.0**40 if index == OVERFLOWS and self.cp_strategy.data_rank == 1 else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weights.append(_weights(self))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(_gradients(self))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scales.append(self.scaler.get_scale())


def _weights(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach().clone()


def _gradients(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def _alone(weights: Tensor, indices: list[int], *, scale: float | None) -> Tensor:
    """Gradients of one process on a global batch: in float32, or with a scale in mixed float16."""
    module, data = TrainsWan().to(weights.device), Clips(16)
    vector_to_parameters(weights, module.parameters())
    batch = {name: x.to(weights.device) for name, x in default_collate([data[index] for index in indices]).items()}
    with torch.autocast(weights.device.type, torch.float16, enabled=scale is not None):
        loss = module.loss(batch)
    (loss.float() * (scale or 1.0)).backward()  # type: ignore[no-untyped-call]
    return _gradients(module).cpu() / (scale or 1.0)


def _relative_errors(module: _Overflows) -> list[tuple[float, float]]:
    """Errors of the gradients in each step that counts: ours, and those of one process in the same precision."""
    first, second = everyones(module.seen)[::2]
    found = []
    for step in range(STEPS):
        if step != OVERFLOWS:
            weights, indices = module.weights[step], first[step] + second[step]
            exact = _alone(weights.cpu(), indices, scale=None)  # a GPU's convolutions round float32 to TF32
            single = _alone(weights, indices, scale=SCALE)
            ours, theirs = (float((x - exact).norm() / exact.norm()) for x in (module.gradients[step].cpu(), single))
            found.append((ours, theirs))
    return found


def _share_a_gpu(rank: int) -> None:
    """Make each rank a separate node for Lightning, because it gives each rank of a node another GPU."""
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank))


def _with_trainer(rank: int, world: int) -> _Overflows:
    _share_a_gpu(rank)
    strategy = pytorch.ContextParallelStrategy(ring=2, process_group_backend="gloo")
    trainer = Trainer(**ON_GPU, devices=1, num_nodes=world, strategy=strategy, max_epochs=1, **QUIET)  # type: ignore[arg-type]
    module = _Overflows(strategy, trainer.precision_plugin.scaler)  # type: ignore[attr-defined]
    trainer.fit(module, DataLoader(Clips(16), batch_size=2))
    return module


def _with_fabric(rank: int, world: int) -> _Overflows:
    _share_a_gpu(rank)
    strategy = fabric.ContextParallelStrategy(ring=2, process_group_backend="gloo")
    runs = Fabric(**ON_GPU, devices=1, num_nodes=world, strategy=strategy)
    runs.launch()
    module = _Overflows(strategy, strategy.precision.scaler)  # type: ignore[attr-defined]
    wrapped, optimizer = runs.setup(module, torch.optim.SGD(module.parameters(), lr=module.lr))
    for index, batch in enumerate(runs.setup_dataloaders(DataLoader(Clips(16), batch_size=2))):
        module.on_train_batch_start(batch, index)
        runs.backward(wrapped.training_step(batch, index))
        runs.clip_gradients(wrapped, optimizer, max_norm=math.inf, error_if_nonfinite=False)  # unscales
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        module.on_train_batch_end(None, batch, index)
    return module


def _trained(rank: int, world: int, flavour: str) -> tuple[list[bool], list[float], list[tuple[float, float]]]:
    """For each step whether it was skipped, and the scale after it; errors of the gradients."""
    module = {"trainer": _with_trainer, "fabric": _with_fabric}[flavour](rank, world)
    weights = [*module.weights, _weights(module).to(module.weights[0].device)]
    skipped = [torch.equal(before, after) for before, after in pairwise(weights)]
    return skipped, module.scales, _relative_errors(module)


@pytest.mark.parametrize("flavour", ["trainer", "fabric"])
def test_an_overflow_on_some_ranks_skips_the_step_on_all(run_ranks: RankPool, flavour: str) -> None:
    for skipped, scales, errors in run_ranks(4, _trained, flavour, init=False, timeout_s=180):
        assert skipped == [step == OVERFLOWS for step in range(STEPS)]
        assert scales == [SCALE / 2 if step >= OVERFLOWS else SCALE for step in range(STEPS)]
        for ours, single in errors:
            assert 1e-5 < single < 0.01
            assert 1e-5 < ours < 2 * single
