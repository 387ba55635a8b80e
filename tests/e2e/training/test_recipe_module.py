"""The recipe trains `FineTuning`: a Trainer of one's own gets the same losses, validation and export."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor

from lightning_cp.callbacks import EMACallback, StepMetrics
from lightning_cp.finetune import FineTuning, LoraSettings, add_lora, hold_out, load_transformer
from lightning_cp.latent_cache import LatentCache, LatentData
from lightning_cp.launch import Machine
from lightning_cp.launch.channel import Stopped
from lightning_cp.objectives import MicroBatch, objective_for
from lightning_cp.recipes.runs.recipe import check_config
from lightning_cp.recipes.training.finetune import FineTune
from lightning_cp.recipes.training.fit import fit_model
from lightning_cp.recipes.training.records import read_metrics
from lightning_cp.recipes.training.run import Run
from lightning_cp.training.ranks import DataShard
from tests.dist.finetune.test_finetuning_module import Recorded, trainer_of
from tests.e2e.finetuning import write_cache
from tests.e2e.recipe import ROOT
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3
SETTINGS = (
    *("progress=false", "warmup_steps=1", "optim.lr=0.01", "accelerator=cpu", "batch_size=4", "lora.rank=2"),
    *("checkpoint_every=2", "data.validation=2", f"validation.every={STEPS}", "validation.quantiles=[0.3,0.7]"),
    "ema_decay=0.5",
)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a Flux pipeline, six pictures and their cache."""
    return write_cache(tmp_path_factory.mktemp("flux"), "flux")


@contextmanager
def _one_more() -> Iterator[None]:
    """Add 1 to the loss of `FineTuning`, which changes no gradient. Check that cuDNN's attention is not used."""
    plain = FineTuning.loss

    def check(*_: object) -> None:
        assert not torch.backends.cuda.cudnn_sdp_enabled()

    def loss(self: FineTuning, part: MicroBatch) -> tuple[Tensor, Tensor]:
        check()
        value, sigma = plain(self, part)
        value.register_hook(check)
        return value + part.share, sigma

    with patch.object(FineTuning, "loss", loss):
        yield


def _stop_after(step: int | None) -> Callable[[Run], None]:
    """Receive SIGTERM after a step, so that the run is stopped after the next one; None: never."""
    return lambda run: os.kill(os.getpid(), signal.SIGTERM) if run.state.step == step else None


def _recipe(rank: int, world: int, made: Path, folder: Path, *given: str, stop_after: int | None = None) -> list[float]:
    """Run what the recipe runs on a rank, in this process, with 1 added to the loss. Returns: the losses."""
    overrides = [
        "experiment=finetune_flux",
        f"model.pretrained={made / 'pipe'}",
        f"data.path={made / 'latents'}",
        *SETTINGS,
        *(f"run_dir={folder}", f"output_root={folder.parent}", f"max_steps={STEPS}"),
        *given,
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", overrides)
    with _one_more():
        checked = check_config(config, Machine.this(), None).config
        with nullcontext() if stop_after is None else pytest.raises(Stopped, match="stopped by SIGTERM after step"):
            fit_model(checked, FineTune.of, after_step=_stop_after(stop_after), at_end=lambda _: None)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    return [row.loss for row in read_metrics(folder / "metrics.csv")]


def _stopped_recipe(rank: int, world: int, made: Path, folder: Path, *given: str) -> list[float]:
    """Run the recipe until it is stopped after step 3."""
    return _recipe(rank, world, made, folder, *given, stop_after=2)


def _own_trainer(rank: int, world: int, made: Path, folder: Path) -> tuple[list[float], dict[str, float]]:
    """Train with the settings of the recipe's configuration, and export. Returns: losses, and the last metrics."""
    cache = LatentCache(made / "latents")
    family = cache.family()
    transformer = load_transformer(made / "pipe", dtype=torch.float32)
    add_lora(transformer, LoraSettings(rank=2), family=family, seed=0)
    data, held_out = hold_out(LatentData(cache, seed=0), 2, seed=0)
    module = FineTuning(
        transformer,
        family,
        objective=objective_for(family, seed=0, cond_dropout=0.1),
        optimizer=lambda trained: torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01),
        data=data,
        batch_size=4,
        held_out=held_out,
        quantiles=(0.3, 0.7),
    )
    recorded, average = Recorded(), EMACallback(0.5)
    best = ModelCheckpoint(folder, monitor="val_loss", filename="best")
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "gradient_clip_val": 1.0,
        "val_check_interval": STEPS,
        "enable_checkpointing": True,
    }
    callbacks = [recorded, average, StepMetrics(tokens=100), best]
    trainer = trainer_of(rank, world, "auto", callbacks=callbacks, **settings)
    trainer.fit(module)
    assert best.best_model_score == pytest.approx(trainer.callback_metrics["val_loss"])
    with average.averaged(trainer, module):
        assert module.export(folder) == folder / "lora"
    return recorded.losses, {key: float(x) for key, x in trainer.callback_metrics.items()}


@pytest.mark.parametrize("given", [("trainer=lightning", "micro_batch_size=3"), ()], ids=" ".join)
@pytest.mark.default(1)
def test_the_recipe_trains_the_module(given: tuple[str, ...], flux: Path, tmp_path: Path, run_ranks: RankPool) -> None:
    (increased,) = run_ranks(1, _recipe, flux, tmp_path / "recipe", *given, init=False)
    ((losses, metrics),) = run_ranks(1, _own_trainer, flux, tmp_path / "own", init=False)
    assert len(set(losses)) == STEPS
    assert increased == pytest.approx([loss + 1 for loss in losses], rel=1e-5)
    half = f"resume={tmp_path / 'recipe/checkpoints/step_00000002'}"
    (resumed,) = run_ranks(1, _recipe, flux, tmp_path / "resumed", *given, half, init=False)
    assert resumed == pytest.approx(increased, rel=1e-6)
    last = read_metrics(tmp_path / "recipe/metrics.csv")[-1]
    assert last.val_loss == pytest.approx(metrics["val_loss"], rel=1e-5)
    assert last.sigma == pytest.approx(metrics["sigma"], rel=1e-6)
    assert last.grad_norm == pytest.approx(metrics["grad_norm"], rel=1e-4)
    assert metrics["peak_memory_gib"] > 0
    assert metrics["tokens_per_s"] == pytest.approx(100 / metrics["step_time_s"])
    for name in ("pytorch_lora_weights.safetensors", "comfyui.safetensors"):
        found, expected = (load_file(tmp_path / run / "lora" / name) for run in ("recipe", "own"))
        assert found.keys() == expected.keys()
        for key, x in found.items():
            torch.testing.assert_close(x, expected[key], rtol=1e-3, atol=1e-4)


def _validated(rank: int, world: int, made: Path, lora: Path) -> float:
    """Return the validation loss of an exported LoRA."""
    cache = LatentCache(made / "latents")
    family, (_, held_out) = cache.family(), hold_out(LatentData(cache), 2, seed=0)
    transformer = load_transformer(made / "pipe", dtype=torch.float32)
    add_lora(transformer, LoraSettings(rank=2, file=lora), family=family)
    module = FineTuning(transformer, family, held_out=held_out, quantiles=(0.3, 0.7))
    return module.validate(Fabric(accelerator="cpu", devices=1), DataShard(0, 1)).loss


@pytest.mark.full
def test_best_is_the_step_with_the_lowest_validation_loss(flux: Path, tmp_path: Path, run_ranks: RankPool) -> None:
    given = ("validation.every=1", "optim.lr=0.3", "max_steps=2", "ema_decay=0.1")  # the rate lets the loss rise
    run_ranks(1, _recipe, flux, tmp_path / "recipe", *given, init=False)
    losses = [row.val_loss for row in read_metrics(tmp_path / "recipe/metrics.csv")]
    assert losses[0] < losses[1]
    for folder, expected in (("recipe/best/lora", min(losses)), ("recipe/lora", losses[-1])):
        (found,) = run_ranks(1, _validated, flux, tmp_path / folder, init=False)
        assert found == pytest.approx(expected, rel=1e-5)


def _weights(folder: Path) -> dict[tuple[str, str], bytes]:
    """Return the bytes of each weight by its file and name."""
    files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    return {(file, name): x.numpy().tobytes() for file, state in files.items() for name, x in state.items()}


@pytest.mark.parametrize("given", [(), ("lora=null",), ("trainer=lightning",)], ids=" ".join)
@pytest.mark.default(1)
def test_weights_are_saved_every_few_steps_and_at_a_stop(
    given: tuple[str, ...], flux: Path, tmp_path: Path, run_ranks: RankPool
) -> None:
    """Losses and weights are bit-equal with and without. Saved files are those of a run that ends after this step."""
    (plain,) = run_ranks(1, _recipe, flux, tmp_path / "plain", *given, init=False)
    (two,) = run_ranks(1, _recipe, flux, tmp_path / "two", *given, "max_steps=2", "validation.every=2", init=False)
    saving = (*given, "save_every=2")
    (all_steps,) = run_ranks(1, _recipe, flux, tmp_path / "saving", *saving, init=False)
    stopped_at = (*saving, "max_steps=9")
    (stopped,) = run_ranks(1, _stopped_recipe, flux, tmp_path / "stopped", *stopped_at, init=False)
    assert plain == all_steps == stopped
    assert two == plain[:2]
    folder = "transformer" if "lora=null" in given else "lora"
    expected = {2: _weights(tmp_path / "two" / folder), 3: _weights(tmp_path / "plain" / folder)}
    assert expected[2].keys() == expected[3].keys() != set()
    assert expected[2] != expected[3]
    for run, steps in (("plain", ()), ("saving", (2,)), ("stopped", (2, 3))):
        saved = sorted((tmp_path / run).glob("saved/*"))
        assert [path.name for path in saved] == [f"step_{step:08d}" for step in steps]
        for path, step in zip(saved, steps, strict=True):
            assert _weights(path / folder) == expected[step]
    assert _weights(tmp_path / "saving" / folder) == expected[3]
    assert (tmp_path / "stopped/checkpoints/step_00000003/manifest.json").is_file()
