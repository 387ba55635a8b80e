"""PromptSampler in a SamplingCallback: the same pictures at every number of ranks, and training is not affected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from PIL import Image

from lightning_cp.callbacks import EMACallback, SamplingCallback
from lightning_cp.finetune import FineTuning, LoraSettings, PromptSampler, add_lora, load_transformer
from lightning_cp.latent_cache import LatentCache, LatentData
from lightning_cp.pytorch import ContextParallelFSDPStrategy, ContextParallelStrategy
from tests.dist.lightning_ranks import trainer_of
from tests.e2e.finetuning import write_cache
from tests.families.cases import CASES
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = ("wave number 1", "a red fox", "a blue bird")
STEPS = 3
_, HEIGHT, WIDTH = CASES["flux"].size


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a Flux pipeline, six pictures and their cache."""
    return write_cache(tmp_path_factory.mktemp("flux"), "flux")


class _Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))


def _fit(rank: int, world: int, made: Path, strategy: str, folder: Path | None) -> list[float]:
    """Train with dropout, which draws from the global random state. Args: folder: of the pictures; None: none."""
    torch.manual_seed(0)
    cache = LatentCache(made / "latents")
    transformer = load_transformer(made / "pipe", dtype=torch.float32)
    add_lora(transformer, LoraSettings(rank=2, dropout=0.3 if world > 1 else 0.0), family=cache.family())
    module = FineTuning(
        transformer,
        cache.family(),
        optimizer=lambda trained: torch.optim.AdamW(trained, lr=1e-2),
        data=LatentData(cache),
        batch_size=2,
    )
    losses = _Losses()
    callbacks: list[Callback] = [losses, EMACallback(0.5)]
    if folder is not None:
        sampler = PromptSampler(made / "pipe", PROMPTS, height=HEIGHT, width=WIDTH, num_inference_steps=2)
        callbacks.append(
            SamplingCallback(
                sampler, every_n_train_steps=2, num_samples=len(sampler), value_range=(0, 1), folder=folder
            )
        )
    kinds = {"cp": ContextParallelStrategy, "cp_fsdp": ContextParallelFSDPStrategy}
    used: Any = kinds[strategy](ring=3 if world == 3 else 2) if world > 1 else "auto"
    trainer_of(rank, world, used, max_steps=STEPS, callbacks=callbacks).fit(module)
    return losses.losses


@pytest.mark.full
@pytest.mark.parametrize(("world", "strategy"), [(3, "cp"), (4, "cp_fsdp")])
def test_losses_are_the_same_with_and_without_pictures(
    world: int, strategy: str, flux: Path, run_ranks: RankPool, tmp_path: Path
) -> None:
    drawn, *_ = run_ranks(world, _fit, flux, strategy, tmp_path, init=False)
    plain, *_ = run_ranks(world, _fit, flux, strategy, None, init=False)
    assert len(set(drawn)) == STEPS
    assert drawn == plain
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == ["step_00000002.png", "step_00000003.png"]
    assert (_pixels(tmp_path, 2) != _pixels(tmp_path, 3)).any()


def _pixels(folder: Path, step: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    return np.asarray(Image.open(folder / f"samples/step_{step:08d}.png")).astype(np.int16)


def _drawn(rank: int, world: int, made: Path, kind: str, ring: int, prompts: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Draw twice without training, and gather what the data ranks draw."""
    from lightning.fabric import Fabric

    from lightning_cp import fabric as strategies
    from lightning_cp.sampling.draw import gather_samples
    from lightning_cp.training.ranks import DataShard

    strategy: Any = getattr(strategies, kind)(ring=ring) if world > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    transformer: Any = load_transformer(made / "pipe", dtype=torch.float32)
    fabric.setup_module(transformer)
    transformer.eval()
    sampler = PromptSampler(made / "pipe", prompts, height=HEIGHT, width=WIDTH, num_inference_steps=2)
    shard = DataShard.of(fabric.strategy)
    sampler.prepare(transformer, fabric, shard)
    return [gather_samples(fabric, sampler.draw(), shard)[: len(prompts)] for _ in range(2)]


SIZED = [PROMPTS[0], {"prompt": PROMPTS[0], "seed": 0}, {"prompt": PROMPTS[0], "seed": 7, "height": 2 * HEIGHT}]
UNEQUAL = [*SIZED, {"prompt": PROMPTS[0], "num_inference_steps": 3, "negative_prompt": "a", "true_cfg_scale": 2.0}]


@pytest.mark.parametrize(
    ("prompts", "kind", "world", "ring"),
    [(SIZED, "ContextParallelStrategy", 3, 3), (UNEQUAL, "ContextParallelFSDPStrategy", 4, 2)],
    ids=lambda x: str(len(x)) if isinstance(x, (list, tuple)) else None,
)
@pytest.mark.full
def test_samples_depend_neither_on_the_ranks_nor_on_the_call(
    prompts: Sequence[Any], kind: str, world: int, ring: int, flux: Path, run_ranks: RankPool
) -> None:
    (expected,) = run_ranks(1, _drawn, flux, kind, 1, prompts, init=False)
    for found in run_ranks(world, _drawn, flux, kind, ring, prompts, init=False):
        for samples in found:
            for one, other in zip(samples, expected[0], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if prompts is PROMPTS:
        assert len({float(x.sum()) for x in expected[0]}) == len(PROMPTS)
        return
    assert torch.equal(expected[0][0], expected[0][1]), "the first seed is 0"
    assert [tuple(x.shape) for x in expected[0][1:3]] == [(3, HEIGHT, WIDTH), (3, 2 * HEIGHT, WIDTH)]
