"""A context degree per batch on ranks that share a GPU: losses and weights of one process, equal random numbers."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_cp.families import family_for
from lightning_cp.finetune import FineTuning, divided_loader
from lightning_cp.finetune.objectives.micro_batch import DividedBatch
from lightning_cp.objectives import objective_for
from lightning_cp.pytorch import ContextParallelStrategy
from tests.dist.finetune.test_mixed_shapes import BATCH, DEGREES, STEPS, Clips
from tests.dist.lightning_ranks import QUIET, flat
from tests.families.cases import made
from tests.harness import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
LIMIT = 1e-3  # Wan computes some layers in float32, and a GPU its convolutions in TF32


class _Recorded(Callback):
    """Loss and context degree of each step, and random numbers of the GPU that are drawn after it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.degrees: list[int] = []
        self.drawn: list[tuple[float, ...]] = []

    @override
    def on_train_batch_end(self, trainer: Any, _: Any, __: Any, batch: DividedBatch, *___: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        self.degrees.append(batch.degree)
        # as many numbers as dropout of this rank's samples would take
        self.drawn.append(tuple(torch.rand(len(batch) + 2, device=DEVICE).tolist()[:2]))


def _fit(rank: int, world: int, settings: dict[str, Any]) -> tuple[list[float], list[int], list[Any], Tensor]:
    """Train a tiny Wan in float64. Returns: what is recorded, and the weights.

    Each rank is a node for Lightning, which gives the ranks of a node different GPUs.
    """
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    pipe = made("wan")
    family = family_for(pipe)
    transformer = copy.deepcopy(pipe.transformer).double().train().requires_grad_(True)
    module = FineTuning(
        transformer,
        family,
        objective=objective_for(family, seed=3, loss_dtype=torch.float64),
        optimizer=lambda trained: torch.optim.SGD(trained, lr=0.02),
    )
    strategy = ContextParallelStrategy(process_group_backend="gloo", **settings)
    recorded, data = _Recorded(), Clips(family)
    trainer = Trainer(
        accelerator=DEVICE.type,
        devices=1,
        num_nodes=world,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[recorded],
        **QUIET,  # type: ignore[arg-type]
    )
    given: dict[str, Any] = {"batch_size": BATCH, "seed": 1, "attention_tokens": 50.0}
    module.train_dataloader = lambda: divided_loader(data, ranks=strategy, **given)  # type: ignore[method-assign]
    trainer.fit(module)
    return recorded.losses, recorded.degrees, recorded.drawn, flat(transformer).cpu()


@pytest.mark.parametrize("degrees", [DEGREES, {"ring": 4, "degrees": {36: 2}}], ids=["1, 2, 4", "2, 4"])
def test_losses_and_weights_equal_one_process(run_ranks: RankPool, degrees: dict[str, Any]) -> None:
    ((alone, _, _, weights),) = run_ranks(1, _fit, {}, init=False, timeout_s=180)
    assert len(set(alone)) == STEPS
    runs = run_ranks(4, _fit, degrees, init=False, timeout_s=180)
    chosen = runs[0][1]
    assert len(set(chosen)) > 1
    for losses, found, _, ends in runs:
        assert found == chosen
        assert losses == pytest.approx(alone, rel=LIMIT)
        assert (ends - weights).norm() < LIMIT * weights.norm()
    for step, degree in enumerate(chosen):
        drawn = [run[2][step] for run in runs]
        groups = [drawn[first : first + degree] for first in range(0, 4, degree)]
        assert all(len(set(group)) == 1 for group in groups), (step, degree, drawn)
        assert len({group[0] for group in groups}) == len(groups), (step, degree, drawn)
