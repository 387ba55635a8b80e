"""Averaged weights of the Trainer, whole and sharded, without drawing samples."""

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
from lightning_cp.pytorch import ContextParallelFSDPStrategy, ContextParallelStrategy
from tests.dist.lightning_ranks import flat, trainer_of
from tests.dist.module import Clips, TrainsWan
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
DECAY = 0.5
STRATEGIES: dict[str, Any] = {"cp": ContextParallelStrategy, "cp_fsdp": ContextParallelFSDPStrategy}


class Watched(TrainsWan):
    """Records the weights of each validation."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.validated: list[Tensor] = []

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    @override
    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.validated.append(flat(self))
        super().validation_step(batch, index)

    @override
    def test_step(self, batch: dict[str, Tensor], index: int) -> None:
        if batch["index"][0] < 0:
            raise LookupError("a test fails")
        self.validation_step(batch, index)


class Weights(Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.after: list[Tensor] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > len(self.after):
            self.after.append(flat(pl_module))


def _fit(
    rank: int, world: int, kind: str, *callbacks: Callback, steps: int = 4, resume: Any = None, **settings: Any
) -> tuple[Any, Watched]:
    torch.manual_seed(3)
    module = Watched()
    trainer = trainer_of(
        rank,
        world,
        STRATEGIES[kind](ring=world, **settings),
        max_steps=steps,
        accumulate_grad_batches=2,
        val_check_interval=4,
        limit_val_batches=1,
        callbacks=list(callbacks),
    )
    clips = Clips(2)
    loader = DataLoader([clips[i % 2] for i in range(16)], batch_size=2)  # type: ignore[arg-type]  # equal batches
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return trainer, module


def _averaged(rank: int, world: int, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    recorder, average = Weights(), EMACallback(DECAY)
    trainer, module = _fit(rank, world, kind, recorder, average, **settings)
    _, alone = _fit(rank, world, kind, **settings)
    own = flat(module)
    with torch.inference_mode(), average.averaged(trainer, module):  # Trainer.test runs in it, except with gloo
        inside = flat(module)
    trainer.test(module, DataLoader(Clips(2), batch_size=2), verbose=False)
    broken: Any = [{**Clips(1)[0], "index": torch.tensor(-1)}]
    with pytest.raises(LookupError, match="a test fails"):
        trainer.test(module, DataLoader(broken), verbose=False)
    assert torch.equal(flat(module), own), "after a test that has failed"
    return {
        "untouched": torch.equal(own, flat(alone)),
        "after": recorder.after,
        "inside": inside,
        "validated": module.validated,
        "state": torch.cat([x.flatten() for x in average.state_dict().values()] or [torch.zeros(0)]),
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "world", "settings"),
    [("cp", 2, {}), ("cp_fsdp", 2, {"reshard_after_forward": False}), ("cp_fsdp", 3, {})],
)
def test_weights_are_averaged_and_validated_and_training_goes_on_with_its_own(
    run_ranks: RankPool, kind: str, world: int, settings: dict[str, Any]
) -> None:
    first, *others = run_ranks(world, _averaged, kind, settings, init=False)
    torch.manual_seed(3)
    kept, expected = flat(Watched()), []
    for step, after in enumerate(first["after"], 1):
        kept = kept.lerp(after, 1 - min(DECAY, (1 + step) / (10 + step)))
        expected.append(kept)
    assert len(expected) == 4
    for found in (first, *others):
        assert found["untouched"]
        assert (found["inside"] - kept).norm() < 1e-5 * kept.norm()
        validated = zip(
            found["validated"], (expected[1], expected[3], expected[3]), strict=True
        )  # the last is the test
        assert all((one - other).norm() < 1e-5 * kept.norm() for one, other in validated)
    assert torch.equal(first["state"], first["inside"])
    assert all(len(found["state"]) == 0 for found in others), "rank 0 alone holds them whole"


def _fitted_twice(rank: int, world: int, kind: str) -> tuple[list[Tensor], Tensor]:
    recorder, average = Weights(), EMACallback(DECAY)
    trainer, module = _fit(rank, world, kind, recorder, average, steps=2)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, DataLoader(Clips(8), batch_size=2))
    with average.averaged(trainer, module):
        return recorder.after, flat(module)


@pytest.mark.parametrize("kind", ["cp_fsdp", "cp"])
@pytest.mark.default(1)
def test_a_second_fit_continues_the_average(run_ranks: RankPool, kind: str) -> None:
    torch.manual_seed(3)
    kept = flat(Watched())
    for after, average in run_ranks(3, _fitted_twice, kind, init=False):
        expected = kept
        for step, weights in enumerate(after, 1):
            expected = expected.lerp(weights, 1 - min(DECAY, (1 + step) / (10 + step)))
        assert len(after) == 4
        assert (average - expected).norm() < 1e-5 * expected.norm()


def _resumed(rank: int, world: int, kind: str, other: str, folder: str) -> float:
    whole, half, rest = (EMACallback(DECAY, evaluate=False) for _ in range(3))
    path = Path(folder) / "half.ckpt"
    _, straight = _fit(rank, world, kind, whole)
    settings = {"save_distributed_checkpoint": False} if kind == "cp_fsdp" and other != kind else {}
    trainer, _ = _fit(rank, world, kind, half, steps=2, **settings)
    trainer.save_checkpoint(path)
    second, module = _fit(rank, world, other, rest, steps=4, resume=path)
    assert not straight.validated or not torch.equal(straight.validated[0], flat(module))
    with rest.averaged(second, module), whole.averaged(trainer, straight):
        return float((flat(module) - flat(straight)).norm() / flat(module).norm())


@pytest.mark.parametrize(
    ("kind", "other"),
    [("cp", "cp_fsdp"), *(pytest.param("cp_fsdp", other, marks=pytest.mark.full) for other in ("cp_fsdp", "cp"))],
)
def test_a_checkpoint_continues_the_average(run_ranks: RankPool, tmp_path: Path, kind: str, other: str) -> None:
    assert max(run_ranks(2, _resumed, kind, other, str(tmp_path), init=False)) < 1e-5


def _refused(rank: int, world: int, folder: str) -> list[str]:
    said = []
    pictures = SamplingCallback(lambda *_: torch.zeros(1, 1, 4, 4), every_n_train_steps=1, ema_decay=0.9)
    with pytest.raises(ValueError, match="both average") as caught:
        _fit(rank, world, "cp", pictures, EMACallback(0.99))
    said.append(str(caught.value))
    average = EMACallback()
    average.load_state_dict({"transformer.other": torch.zeros(3)})
    with pytest.raises(ValueError, match="EMA weights in the checkpoint do not fit this module") as caught:
        _fit(rank, world, "cp", average)
    said.append(str(caught.value))
    drawn: list[Tensor] = []
    pictures = SamplingCallback(
        lambda module, _: drawn.append(flat(module)) or torch.zeros(1, 1, 4, 4),  # type: ignore[func-returns-value]
        every_n_train_steps=4,
        folder=folder,
    )
    average = EMACallback(DECAY)
    trainer, module = _fit(rank, world, "cp_fsdp", pictures, average)
    with average.averaged(trainer, module):
        assert torch.equal(drawn[-1], flat(module)), "pictures show the averages of the other callback"
    return said


@pytest.mark.full
def test_other_averages_are_used_or_refused(run_ranks: RankPool, tmp_path: Path) -> None:
    for both, unlike in run_ranks(2, _refused, str(tmp_path), init=False):
        assert both.startswith("SamplingCallback(ema_decay=0.9) and EMACallback both average the weights")
        assert "transformer.other has shape (3,) in the checkpoint and none here" in unlike or (
            "has shape none in the checkpoint" in unlike
        )
