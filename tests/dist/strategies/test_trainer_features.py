"""Features of a training run besides its steps, at ring 2 x data 2 under the Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cp import selective_checkpoint
from lightning_cp.pytorch import ContextParallelStrategy
from tests.dist.lightning_ranks import QUIET, everyones, flat, trainer_of
from tests.dist.module import Clips, TrainsWan
from tests.dist.strategies.test_initial_weights import BY_PLAN, Mixed, inputs
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3


def _reference(seen: list[list[int]], *, clip: Callable[[Any], object], dtype: torch.dtype, autocast: bool) -> Tensor:
    """One process on the global batches."""
    module, data = TrainsWan().to(dtype), Clips(16)
    optimizer = torch.optim.SGD(module.parameters(), lr=module.lr)
    for indices in seen:
        batch = next(iter(DataLoader([data[index] for index in indices], batch_size=len(indices))))  # type: ignore[arg-type]
        batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = module.loss(batch)
        loss.backward()
        clip(module.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return flat(module)


def _feature(rank: int, world: int, name: str) -> float:
    module = TrainsWan()
    settings: dict[str, Any] = {}
    clip: Callable[[Any], object] = lambda parameters: None  # noqa: E731
    if name == "clip by value":
        settings = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
        clip = lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-3)  # noqa: E731
    if name in ("bf16-mixed", "bf16-true"):
        settings = {"precision": name}
    if name == "activation checkpointing":
        module.train()
        module.transformer.enable_gradient_checkpointing()
    if name == "selective checkpointing":
        module.train()
        module.transformer.enable_gradient_checkpointing(gradient_checkpointing_func=selective_checkpoint)
    if name.startswith("compiled blocks"):
        module.train()
        if name.endswith("checkpointed"):
            module.transformer.enable_gradient_checkpointing(gradient_checkpointing_func=selective_checkpoint)
        module.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    trainer = trainer_of(rank, world, ContextParallelStrategy(ring=2), max_steps=STEPS, **settings)
    trainer.fit(module, DataLoader(Clips(16), batch_size=2))
    first, second = everyones(module.seen)[::2]
    seen = [a + b for a, b in zip(first, second, strict=True)]
    dtype = torch.bfloat16 if name == "bf16-true" else torch.float32
    expected = _reference(seen, clip=clip, dtype=dtype, autocast=name == "bf16-mixed")
    start = flat(TrainsWan().to(dtype))
    return float((flat(module) - expected).norm() / (expected - start).norm())


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("clip by value", 1e-3),
        ("bf16-mixed", 0.05),
        pytest.param("bf16-true", 0.2, marks=pytest.mark.full),
        pytest.param("activation checkpointing", 1e-4, marks=pytest.mark.full),
        ("selective checkpointing", 1e-4),
        pytest.param("compiled blocks", 1e-4, marks=pytest.mark.full),
        pytest.param("compiled blocks, checkpointed", 1e-4, marks=pytest.mark.full),
    ],
)
@pytest.mark.default("bf16")
def test_a_feature_trains_as_in_one_process(run_ranks: RankPool, name: str, tolerance: float) -> None:
    errors = run_ranks(4, _feature, name, init=False)
    assert max(errors) < tolerance
    assert max(errors) - min(errors) < 1e-6


def _callbacks(rank: int, world: int, folder: str) -> dict[str, Any]:
    module, data = TrainsWan(), Clips(8)
    checkpoint = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last=True)
    average = EMAWeightAveraging(decay=0.5)
    stopping = EarlyStopping("val_loss", mode="max", patience=1)  # the loss falls, so it stops after two epochs
    trainer = trainer_of(
        rank,
        world,
        ContextParallelStrategy(ring=2),
        **{"max_epochs": 5, "enable_checkpointing": True, "logger": CSVLogger(folder, version=0), "profiler": "simple"},
        callbacks=[checkpoint, average, stopping],
        log_every_n_steps=1,
    )
    loader = DataLoader(data, batch_size=2)
    trainer.fit(module, loader, loader)
    best = torch.load(checkpoint.best_model_path, weights_only=True)["state_dict"]
    again = TrainsWan()
    again.load_state_dict(best)
    loss = trainer.validate(again, loader, verbose=False)[0]["val_loss"]
    dist.barrier()  # the first rank has written all
    return {
        "epochs": trainer.current_epoch,
        "best": checkpoint.best_model_path,
        "same": abs(loss / float(checkpoint.best_model_score) - 1),  # type: ignore[arg-type]
        "files": sorted(path.name for path in Path(folder).glob("*.ckpt")),
        "rows": len((Path(folder) / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()),
    }


@pytest.mark.full
def test_callbacks_and_loggers_work_as_ever(run_ranks: RankPool, tmp_path: Path) -> None:
    results = run_ranks(4, _callbacks, str(tmp_path), init=False)
    assert all(found == {**results[0], "same": found["same"]} for found in results)
    assert results[0]["epochs"] == 2
    assert results[0]["same"] < 1e-4
    assert len(results[0]["files"]) == 2
    assert results[0]["rows"] > 4


def _averaged(trainer: Trainer, path: str | None = None) -> Tensor:
    """Fit equal samples, from a checkpoint. Returns: the weights, which are the averages after a fit."""
    module, data = Mixed(0), DataLoader([inputs()[0]] * 24, batch_size=2)  # type: ignore[arg-type]
    trainer.fit(module, data, ckpt_path=path)
    return flat(module)


def _resumed(rank: int, world: int, folder: str) -> Tensor:
    for ring, steps, path in ((world, 2, None), (1, 4, f"{folder}/two.ckpt")):
        kept = ModelCheckpoint(folder, "two", every_n_train_steps=2)
        trainer = trainer_of(
            rank,
            world,
            ContextParallelStrategy(ring=ring, **BY_PLAN),
            **{"max_steps": steps, "enable_checkpointing": path is None},
            callbacks=[EMAWeightAveraging(decay=0.5), *([] if path else [kept])],
        )
        found = _averaged(trainer, path)
        dist.barrier()  # the first rank has written the checkpoint
    return found


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_lightnings_average_continues_at_another_degree(run_ranks: RankPool, tmp_path: Path, world: int) -> None:
    alone = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=4,
        callbacks=[EMAWeightAveraging(decay=0.5)],
        **QUIET,  # type: ignore[arg-type]
    )
    expected = _averaged(alone)
    for found in run_ranks(world, _resumed, str(tmp_path), init=False):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def _short(rank: int, world: int) -> tuple[int, int]:
    steps = []
    for settings in ({"fast_dev_run": True}, {"overfit_batches": 1, "max_epochs": 2}):
        module = TrainsWan()
        trainer = trainer_of(rank, world, ContextParallelStrategy(ring=2), **settings)
        trainer.fit(module, DataLoader(Clips(8), batch_size=2), DataLoader(Clips(8), batch_size=2))
        steps.append(len(module.seen))
    return steps[0], steps[1]


def test_short_runs_work_as_ever(run_ranks: RankPool) -> None:
    assert run_ranks(4, _short, init=False) == [(1, 2)] * 4
