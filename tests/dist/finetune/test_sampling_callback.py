"""Pictures during training: drawn with EMA weights by all ranks, written once; training is not affected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.image import imread
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.callbacks.sampling import SamplingCallback
from lightning_cp.pytorch import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.sampling.tiles import tile
from tests.dist.lightning_ranks import everyones, flat, trainer_of
from tests.dist.module import Clips, TrainsWan
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
DECAY = 0.5
STRATEGIES: dict[str, Any] = {"cp": ContextParallelStrategy, "cp_fsdp": ContextParallelFSDPStrategy}


class Noisy(TrainsWan):
    """Its loss depends on the global random state, and on whether it trains."""

    @override
    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        assert self.transformer.training
        noise = torch.randn(1, generator=None).item()
        torch.manual_seed(torch.initial_seed() + 1)
        return super().training_step({**batch, "clip": batch["clip"] + noise}, index)


class Weights(Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.after: list[Tensor] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > len(self.after):
            self.after.append(flat(pl_module))


def _drawn(rank: int, world: int, folder: str, kind: str, average: str) -> dict[str, Any]:
    def fit(*callbacks: Callback, logger: Any = False) -> Tensor:
        torch.manual_seed(3)
        module = Noisy(lr=0.01)
        module.train()
        trainer = trainer_of(
            rank,
            world,
            STRATEGIES[kind](ring=2),
            max_steps=4,
            accumulate_grad_batches=2,
            callbacks=list(callbacks),
            logger=logger,
        )
        trainer.fit(module, DataLoader(Clips(32), batch_size=2))
        return flat(module)

    def others() -> list[Callback]:
        return [EMAWeightAveraging(decay=DECAY)] if average == "lightning" else []

    samples: list[Tensor] = []
    noises: list[Tensor] = []
    weights: list[Tensor] = []

    def sample(module: Any, generator: torch.Generator) -> Tensor:
        assert not module.transformer.training
        torch.randn(3)
        noises.append(torch.randn(2, 4, 3, 6, 10, generator=generator))
        weights.append(flat(module))
        out = module.transformer(noises[-1], torch.tensor([500, 500]), Clips(2).text, return_dict=False)[0]
        samples.append(out[:, :3])
        return samples[-1]

    recorder = Weights()
    pictures = SamplingCallback(sample, every_n_train_steps=2, ema_decay=DECAY if average == "own" else None)
    logger = TensorBoardLogger(folder, name="", version="") if average == "own" else False
    if not logger:
        pictures._folder = folder
    with_pictures = fit(recorder, pictures, *others(), logger=logger)  # it goes behind what averages
    own = pictures.state_dict()
    alone = fit(*others())
    return {
        "untouched": torch.equal(with_pictures, alone),
        "after": recorder.after,
        "weights": weights,
        "noises": everyones(noises),
        "samples": everyones(samples),
        "state": sum(x.numel() for x in own.values()),
        "total": sum(p.numel() for p in Noisy().parameters()),
    }


@pytest.mark.parametrize(("kind", "average"), [("cp", "lightning"), ("cp_fsdp", "none")])
@pytest.mark.full
def test_pictures_use_the_average_and_do_not_change_training(
    run_ranks: RankPool, tmp_path: Path, kind: str, average: str
) -> None:
    first, *others = run_ranks(4, _drawn, str(tmp_path), kind, average, init=False)
    assert all(found["untouched"] for found in (first, *others))
    *_, last = first["after"]
    assert len(first["weights"]) == 2  # steps 2 and 4; the end is step 4
    for drawn, after in zip(first["weights"], (first["after"][1], last), strict=True):
        assert torch.equal(drawn, after) == (average == "none")
    assert (first["state"] == first["total"]) == (average == "own")
    if average != "none":
        kept = flat(Noisy(lr=0.01))
        for step, after in enumerate(first["after"], 1):
            ours = min(DECAY, (1 + step) / (10 + step))
            decay = ours if average == "own" else DECAY * (step > 1)  # Lightning's begins with the first step's weights
            kept = kept.lerp(after, 1 - decay)
        assert (first["weights"][-1] - kept).norm() < 1e-5 * kept.norm()
    (zero, one, two, three) = first["noises"]
    assert all(torch.equal(a, b) for a, b in zip(zero + two, one + three, strict=True))
    assert not torch.equal(zero[0], two[0])
    assert torch.equal(zero[0], zero[1])
    everyone = torch.cat([first["samples"][0][-1], first["samples"][2][-1]])
    files = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert files == ["step_00000002.png", "step_00000004.png"]
    seen = (imread(tmp_path / "samples" / files[-1])[..., :3] * 255).round().astype("uint8")
    assert (torch.from_numpy(seen).int() - tile(everyone).int()).abs().max() <= 1
    if average == "own":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path)).Reload()
        assert [image.step for image in events.Images("samples")] == [2, 4]


def _resumed(rank: int, world: int, folder: str, kind: str) -> float:
    def sample(module: Any, generator: torch.Generator) -> Tensor:
        return torch.rand(1, 1, 4, 4, generator=generator)

    def fit(steps: int, resume: str | None = None) -> tuple[Any, dict[str, Tensor]]:
        pictures = SamplingCallback(sample, every_n_train_steps=9, ema_decay=DECAY, folder=folder)
        trainer = trainer_of(rank, world, STRATEGIES[kind](ring=2), max_steps=steps, callbacks=[pictures])
        trainer.fit(TrainsWan(lr=0.01), DataLoader(Clips(2), batch_size=2), ckpt_path=resume)
        return trainer, pictures.state_dict()

    _, straight = fit(4)
    trainer, _ = fit(2)
    trainer.save_checkpoint(f"{folder}/half.ckpt")
    _, resumed = fit(4, f"{folder}/half.ckpt")
    assert straight.keys() == resumed.keys()
    assert bool(straight) == bool(resumed) == (rank == 0), "rank 0 alone holds them whole"
    return max((float((straight[name] - resumed[name]).abs().max()) for name in straight), default=0.0)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["cp_fsdp", "cp"])
def test_the_callbacks_average_is_saved_and_goes_on(run_ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert max(run_ranks(2, _resumed, str(tmp_path), kind, init=False)) < 1e-6


def _both(rank: int, world: int) -> str:
    callbacks = [
        EMAWeightAveraging(),
        SamplingCallback(lambda *_: torch.zeros(0), every_n_train_steps=1, ema_decay=0.9),
    ]
    trainer = trainer_of(rank, world, ContextParallelStrategy(ring=2), max_steps=1, callbacks=callbacks)
    with pytest.raises(ValueError, match="WeightAveraging") as caught:
        trainer.fit(TrainsWan(), DataLoader(Clips(4), batch_size=2))
    return str(caught.value)


def _unlike(rank: int, world: int) -> str:
    pictures = SamplingCallback(lambda *_: torch.zeros(2 + rank // 2, 1, 4, 4), every_n_train_steps=1)
    trainer = trainer_of(rank, world, ContextParallelStrategy(ring=2), max_steps=1, callbacks=[pictures])
    with pytest.raises(ValueError, match="sample") as caught:
        trainer.fit(TrainsWan(), DataLoader(Clips(4), batch_size=2))
    return str(caught.value)


def test_two_averages_and_unlike_pictures_are_refused(run_ranks: RankPool) -> None:
    for said in run_ranks(4, _unlike, init=False):
        assert "rank 1: (2, 1, 4, 4), rank 2: (3, 1, 4, 4)" in said
    assert all("ema_decay=0.9" in said for said in run_ranks(2, _both, init=False))
    with pytest.raises(ValueError, match="every_n_train_steps=0"):
        SamplingCallback(lambda *_: torch.zeros(0), every_n_train_steps=0)
