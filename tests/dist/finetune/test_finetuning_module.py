"""FineTuning under the Trainer: the same losses at every number of ranks, exact resumes, small checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_cp.families import StoredBatch
from lightning_cp.finetune import FineTuning, HeldOutData, LoraSettings, add_lora, load_transformer
from lightning_cp.latent_cache import LatentCache, LatentData
from lightning_cp.objectives import micro_batches, objective_for
from lightning_cp.pytorch import ContextParallelFSDPStrategy, ContextParallelStrategy
from tests.dist.lightning_ranks import trainer_of
from tests.e2e.finetuning import write_cache
from tests.harness import RankFailure, RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4


class Recorded(Callback):
    """The logged losses of every step, and the validation losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.val_losses: list[float] = []

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))

    @override
    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.val_losses.append(float(trainer.callback_metrics["val_loss"]))


class Doubled(FineTuning):
    """A subclass with its own training step."""

    @override
    def training_step(self, batch: StoredBatch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("doubled", 2 * loss, batch_size=len(batch))
        return 2 * loss


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a Flux pipeline, six pictures and their cache."""
    return write_cache(tmp_path_factory.mktemp("flux"), "flux")


def _module(
    folder: Path, kind: type[FineTuning] = FineTuning, *, lora: bool = True, micro: int | None = None
) -> FineTuning:
    cache = LatentCache(folder / "latents")
    transformer = load_transformer(folder / "pipe", dtype=torch.float32)
    if lora:
        add_lora(transformer, LoraSettings(rank=2), family=cache.family())
    return kind(
        transformer,
        cache.family(),
        optimizer=lambda trained: torch.optim.AdamW(trained, lr=1e-2),
        data=LatentData(cache),
        batch_size=2,
        micro_batch_size=micro,
        held_out=HeldOutData(cache, [0, 3, 5]),
        quantiles=(0.3, 0.7),
    )


def _strategy(name: str) -> Any:
    ring, kind = int(name[-1]), name[:-1]
    if kind == "alone":
        return "auto"
    return (ContextParallelFSDPStrategy if kind == "fsdp" else ContextParallelStrategy)(ring=ring)


def _fit(
    rank: int, world: int, name: str, folder: Path, settings: dict[str, Any], resume: Path | None = None
) -> dict[str, Any]:
    recorded = Recorded()
    kind = settings.pop("kind", FineTuning)
    module = _module(folder, kind, lora=settings.pop("lora", True), micro=settings.pop("micro", None))
    saves = settings.pop("saves", None)
    trainer = trainer_of(
        rank, world, _strategy(name), **{"max_steps": STEPS, "val_check_interval": 2, **settings}, callbacks=[recorded]
    )
    trainer.fit(module, ckpt_path=resume)
    if saves is not None:
        trainer.save_checkpoint(saves)
    metrics = {key: float(x) for key, x in trainer.callback_metrics.items()}
    return {"losses": recorded.losses, "val": recorded.val_losses, "metrics": metrics, "batches": module.batches}


@pytest.fixture(scope="module")
def alone(flux: Path, run_ranks: RankPool) -> dict[str, Any]:
    """The run of one process."""
    (found,) = run_ranks(1, _fit, "alone1", flux, {"saves": flux / "alone.ckpt"}, init=False)
    assert len(found["losses"]) == STEPS
    assert len(set(found["losses"])) == STEPS
    assert len(set(found["val"])) == STEPS // 2
    return found


@pytest.mark.parametrize(("world", "name"), [(3, "cp3"), (4, "cp2")])
@pytest.mark.default(1)
def test_losses_equal_one_process(
    world: int, name: str, flux: Path, alone: dict[str, Any], run_ranks: RankPool
) -> None:
    for found in run_ranks(world, _fit, name, flux, {}, init=False):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert found["val"] == pytest.approx(alone["val"], rel=1e-5)
        assert found["batches"] == STEPS


@pytest.mark.full
def test_micro_batches_change_nothing(flux: Path, alone: dict[str, Any], run_ranks: RankPool) -> None:
    for found in run_ranks(3, _fit, "cp3", flux, {"micro": 1}, init=False):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["metrics"]["sigma"] == pytest.approx(alone["metrics"]["sigma"], rel=1e-6)
    with pytest.raises(RankFailure, match="does not work with micro_batch_size=1"):
        run_ranks(1, _fit, "alone1", flux, {"micro": 1, "accumulate_grad_batches": 2}, init=False)


@pytest.mark.full
def test_micro_batches_have_the_gradients_of_the_whole_batch(flux: Path) -> None:
    """In float64, because the gradients of a float32 transformer already differ by 1e-5 through rounding."""
    module, data = _module(flux).double(), LatentData(LatentCache(flux / "latents"))
    stored, objective = data.collate([data[i] for i in range(4)]), objective_for(module.family, seed=1)
    trained = [p for p in module.parameters() if p.requires_grad]
    for p in trained:
        torch.nn.init.normal_(p, std=0.1)
    found = []
    for size in (None, 3, 1):
        module.zero_grad()
        for part in micro_batches(objective, module.family, stored, size=size, step=2, first_index=4):
            module.loss(part)[0].backward()
        assert all(p.grad is not None for p in trained)
        found.append(torch.cat([p.grad.flatten() for p in trained if p.grad is not None]))
    whole, *others = found
    assert whole.norm() > 1e-3
    for grads in others:
        assert (grads - whole).norm() < 1e-10 * whole.norm()


@pytest.mark.full
def test_a_trainer_checkpoint_resumes_exactly_at_another_number_of_ranks(
    flux: Path, alone: dict[str, Any], run_ranks: RankPool, tmp_path: Path
) -> None:
    saved = tmp_path / "half.ckpt"
    run_ranks(3, _fit, "cp3", flux, {"max_steps": 1, "saves": saved}, init=False)
    for found in run_ranks(2, _fit, "cp2", flux, {}, saved, init=False):
        assert found["losses"] == pytest.approx(alone["losses"][1:], rel=1e-4)
        assert found["val"][-1] == pytest.approx(alone["val"][-1], rel=1e-4)


def test_a_checkpoint_holds_trained_weights_only(flux: Path, alone: dict[str, Any]) -> None:
    state = torch.load(flux / "alone.ckpt", weights_only=True)["state_dict"]
    assert state
    assert all(".lora_" in name for name in state)


def test_a_subclass_can_override_the_training_step(flux: Path, alone: dict[str, Any], run_ranks: RankPool) -> None:
    for found in run_ranks(2, _fit, "cp2", flux, {"kind": Doubled, "max_steps": 2}, init=False):
        assert found["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-4)
        assert found["metrics"]["doubled"] == pytest.approx(2 * found["losses"][-1], rel=1e-5)


def _under_ddp(rank: int, world: int, folder: Path) -> None:
    trainer_of(rank, world, "ddp", max_steps=1).fit(_module(folder))


def test_a_strategy_without_data_ranks_is_refused(flux: Path, run_ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="cannot share data between the 2 ranks of DDPStrategy: use lightning_cp"):
        run_ranks(2, _under_ddp, flux, init=False)


@pytest.mark.full
@pytest.mark.parametrize("lora", [True, False])
def test_sharded_weights_give_the_same_losses_and_checkpoint(
    lora: bool, flux: Path, run_ranks: RankPool, tmp_path: Path
) -> None:
    (expected,) = run_ranks(1, _fit, "alone1", flux, {"lora": lora}, init=False)
    for found in run_ranks(2, _fit, "fsdp2", flux, {"lora": lora, "saves": tmp_path / "fsdp.ckpt"}, init=False):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert found["val"] == pytest.approx(expected["val"], rel=1e-4)
