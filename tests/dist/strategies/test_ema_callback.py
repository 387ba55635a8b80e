"""Averaged weights of the Trainer, ours and Lightning's, whole and sharded, without drawing samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.callbacks import EMACallback, SamplingCallback
from tests.dist.lightning_ranks import BY_PLAN, STRATEGIES, distance, flat, trainer_of
from tests.dist.module import Mixed, same_batches
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
DECAY = 0.5


class Watched(Mixed):
    """Records the weights of each validation."""

    def __init__(self) -> None:
        super().__init__(3)
        self.validated: list[Tensor] = []

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.validated.append(flat(self))
        self(batch)

    def test_step(self, batch: Tensor, index: int) -> None:
        if batch.any():
            self.validation_step(batch, index)
            return
        with self.plain.register_forward_pre_hook(_fail):  # inside of a forward of sharded weights
            self(batch)


def _fail(*_: Any) -> None:
    raise LookupError("a test fails")


class Weights(Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.after: list[Tensor] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > len(self.after):
            self.after.append(flat(pl_module))


def averages_of(after: list[Tensor]) -> list[Tensor]:
    """The averages after each step, from the weights."""
    kept, found = flat(Watched()), []
    for step, weights in enumerate(after, 1):
        kept = kept.lerp(weights, 1 - min(DECAY, (1 + step) / (10 + step)))
        found.append(kept)
    return found


def _fit(
    rank: int, world: int, kind: str, *callbacks: Callback, steps: int = 4, resume: Any = None, **settings: Any
) -> tuple[Any, Watched]:
    module, strategy = Watched(), STRATEGIES["trainer", kind](ring=world, **BY_PLAN, **settings)
    given = {"max_steps": steps, "accumulate_grad_batches": 2, "val_check_interval": 4, "limit_val_batches": 1}
    trainer = trainer_of(rank, world, strategy, callbacks=list(callbacks), **given)
    trainer.fit(module, same_batches(8), same_batches(8), ckpt_path=resume)
    return trainer, module


def _averaged(rank: int, world: int, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    recorder, average = Weights(), EMACallback(DECAY)
    trainer, module = _fit(rank, world, kind, recorder, average, **settings)
    _, alone = _fit(rank, world, kind, **settings)
    own, transformer = flat(module), flat(module.plain)
    with torch.inference_mode(), average.averaged(trainer, module):  # Trainer.test runs in it, except with gloo
        inside = flat(module)
    trainer.test(module, same_batches(1), verbose=False)
    with pytest.raises(LookupError, match="a test fails"):
        trainer.test(module, DataLoader(torch.zeros(2, 7, 16)), verbose=False)  # type: ignore[arg-type]
    state = torch.cat([x.flatten() for x in average.state_dict().values()] or [torch.zeros(0)])
    return {
        "own": own,
        "without": flat(alone),
        "after a test that has failed": torch.equal(flat(module.plain), transformer),
        "after": recorder.after,
        "inside": inside,
        "validated": module.validated,
        "state": state,
    }


@pytest.mark.parametrize(("kind", "world", "settings"), [("cp_fsdp", 3, {}), ("cp", 2, {})])
@pytest.mark.default(1)
def test_weights_are_averaged_and_validated_and_training_goes_on_with_its_own(
    run_ranks: RankPool, kind: str, world: int, settings: dict[str, Any]
) -> None:
    first, *others = run_ranks(world, _averaged, kind, settings, init=False)
    expected = averages_of(first["after"])
    assert len(expected) == 4
    for found in (first, *others):
        assert torch.equal(found["own"], found["without"])
        assert found["after a test that has failed"], "other weights than before"
        assert distance(found["inside"], expected[-1]) < 1e-5
        validated = zip(found["validated"], (expected[1], expected[3], expected[3]), strict=True)  # two, and the test
        assert all(distance(one, other) < 1e-5 for one, other in validated)
    frozen = len(first["inside"]) - len(first["state"])
    assert frozen == sum(p.numel() for p in Watched().encoder.parameters())
    assert torch.equal(first["state"], first["inside"][frozen:])
    assert all(len(found["state"]) == 0 for found in others), "rank 0 alone holds them whole"


def _resumed(rank: int, world: int, kind: str, other: str, folder: Path) -> tuple[Tensor, Tensor]:
    straight, half, rest = (EMACallback(DECAY, evaluate=False) for _ in range(3))
    _, expected = _fit(rank, world, kind, straight)
    settings = {"save_distributed_checkpoint": False} if kind == "cp_fsdp" and other != kind else {}
    trainer, _ = _fit(rank, world, kind, half, steps=2, **settings)
    trainer.save_checkpoint(folder / "half.ckpt")
    second, module = _fit(rank, world, other, rest, steps=4, resume=folder / "half.ckpt")
    with rest.averaged(second, module), straight.averaged(trainer, expected):
        return flat(module), flat(expected)


@pytest.mark.parametrize(("kind", "other"), [("cp", "cp_fsdp"), ("cp_fsdp", "cp")])
@pytest.mark.default(1)
def test_a_checkpoint_continues_the_average(run_ranks: RankPool, tmp_path: Path, kind: str, other: str) -> None:
    for found, expected in run_ranks(2, _resumed, kind, other, tmp_path, init=False):
        assert distance(expected, flat(Watched())) > 1e-3
        assert distance(found, expected) < 1e-5


def _refused(rank: int, world: int, folder: Path) -> tuple[str, str, Tensor, Tensor]:
    pictures = SamplingCallback(lambda *_: torch.zeros(1, 1, 4, 4), every_n_train_steps=1, ema_decay=0.9)
    with pytest.raises(ValueError, match="both average") as both:
        _fit(rank, world, "cp", pictures, EMACallback(0.99))
    average = EMACallback()
    average.load_state_dict({"plain.other": torch.zeros(3)})
    with pytest.raises(ValueError, match="EMA weights in the checkpoint do not fit this module") as unlike:
        _fit(rank, world, "cp", average)
    drawn: list[Tensor] = []
    pictures = SamplingCallback(
        lambda module, _: drawn.append(flat(module)) or torch.zeros(1, 1, 4, 4),  # type: ignore[func-returns-value]
        every_n_train_steps=4,
        folder=str(folder),
    )
    average = EMACallback(DECAY)
    trainer, module = _fit(rank, world, "cp_fsdp", pictures, average)
    with average.averaged(trainer, module):
        return str(both.value), str(unlike.value), drawn[-1], flat(module)


@pytest.mark.full
def test_other_averages_are_used_or_refused(run_ranks: RankPool, tmp_path: Path) -> None:
    for both, unlike, drawn, averages in run_ranks(2, _refused, tmp_path, init=False):
        assert both.startswith("SamplingCallback(ema_decay=0.9) and EMACallback both average the weights")
        assert "plain.other has shape (3,) in the checkpoint and none here" in unlike or (
            "has shape none in the checkpoint" in unlike
        )
        assert torch.equal(drawn, averages), "pictures show the averages of the other callback"
