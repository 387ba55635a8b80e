"""Batches of five sizes, and a context degree per batch: losses and weights of one process at every topology."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_cp.families import Family, StoredBatch, collate, family_for
from lightning_cp.finetune import FineTuning, divided_loader
from lightning_cp.finetune.objectives.micro_batch import DividedBatch
from lightning_cp.objectives import objective_for
from lightning_cp.pytorch import ContextParallelFSDPStrategy, ContextParallelStrategy
from tests.dist.lightning_ranks import flat, trainer_of
from tests.families.cases import made
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
CP, FSDP = ContextParallelStrategy, ContextParallelFSDPStrategy
SIZES = [(1, 4, 4), (1, 4, 6), (1, 6, 6), (3, 4, 6), (3, 8, 8)]  # latent frames, height, width: 4 to 48 tokens
STEPS, BATCH = 4, 5


class Clips(Dataset[Any]):
    """Thirteen random clips of five sizes with captions of different lengths, in float64."""

    def __init__(self, family: Family, weights: list[float] | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.family, self.samples, self.drawn = family, [], Counter[tuple[int, int]]()
        for number in range(13):
            latents = torch.randn(4, *SIZES[number * 3 % 5], generator=generator, dtype=torch.float64)
            text = torch.randn(2 + number, 16, generator=generator, dtype=torch.float64)
            self.samples.append({"latents": latents, "prompt_embeds": text})
        self.buckets = [tuple(sample["latents"].shape) for sample in self.samples]
        self.weights = weights or [1.0] * 13
        self.tokens = [family.grid.tokens(shape) for shape in self.buckets]

    def __len__(self) -> int:
        return len(self.samples)

    @override
    def __getitem__(self, drawn: tuple[int, int]) -> dict[str, Tensor]:
        self.drawn[drawn] += 1
        return self.samples[drawn[0]]

    def collate(self, samples: list[dict[str, Tensor]]) -> StoredBatch:
        return collate(samples, self.family.text)


class Recorded(Callback):
    """Loss and context degree of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.degrees: list[int] = []
        self.states: list[int] = []
        self.positions: list[list[int]] = []

    @override
    def on_train_batch_end(self, trainer: Any, _: Any, __: Any, batch: DividedBatch, *___: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        self.degrees.append(batch.degree)
        self.states.append(hash(tuple(torch.get_rng_state().tolist())))
        self.positions.append([position for part in batch.parts if part.scale for position in part.indices])


def _fit(rank: int, world: int, kind: Any, settings: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    pipe = made("wan")
    family = family_for(pipe)
    transformer = copy.deepcopy(pipe.transformer).double().train().requires_grad_(True)
    if run.get("checkpointed"):
        transformer.enable_gradient_checkpointing()
    module = FineTuning(
        transformer,
        family,
        objective=objective_for(family, seed=3, loss_dtype=torch.float64),
        optimizer=lambda trained: torch.optim.SGD(trained, lr=0.02),
    )
    strategy = kind(**settings) if kind else "auto"
    data, recorded = Clips(family, run.get("weights")), Recorded()
    resume = run.get("resume")
    trainer = trainer_of(rank, world, strategy, max_steps=run.get("steps", STEPS), callbacks=[recorded])
    loader = _Later(data, strategy if kind else None, {"start_step": 2 if resume else 0, **run.get("loader", {})})
    module.train_dataloader = loader.build  # type: ignore[method-assign]
    trainer.fit(module, ckpt_path=resume)
    if "saves" in run:
        trainer.save_checkpoint(run["saves"])
    return {
        "losses": recorded.losses,
        "degrees": recorded.degrees,
        "states": recorded.states,
        "positions": recorded.positions,
        "weights": flat(transformer),
        "drawn": data.drawn,
        "batches": module.batches,
    }


class _Later:
    """The loader, built when the strategy has its ranks."""

    def __init__(self, data: Clips, ranks: Any, settings: dict[str, Any]) -> None:
        self.data, self.ranks, self.settings = data, ranks, settings

    def build(self) -> Any:
        settings = {"batch_size": BATCH, "seed": 1, "attention_tokens": 50.0, **self.settings}
        return divided_loader(self.data, ranks=self.ranks, **settings)


@pytest.fixture(scope="module")
def alone(run_ranks: RankPool) -> dict[str, Any]:
    (one,) = run_ranks(1, _fit, None, {}, {}, init=False)
    assert len(set(one["losses"])) == STEPS
    return one


def _equals(runs: list[dict[str, Any]], alone: dict[str, Any], *, start: int = 0) -> None:
    for run in runs:
        assert run["losses"] == pytest.approx(alone["losses"][start:], rel=1e-8)  # Wan computes some layers in float32
        assert (run["weights"] - alone["weights"]).norm() < 1e-6 * alone["weights"].norm()  # float32 in `flat`


def _draw_equally(runs: list[dict[str, Any]]) -> None:
    """Ranks that share samples have the same random state after each step, whatever the degrees of earlier steps."""
    for step, degree in enumerate(runs[0]["degrees"]):
        states = [run["states"][step] for run in runs]
        groups = [states[first : first + degree] for first in range(0, len(states), degree)]
        assert all(len(set(group)) == 1 for group in groups), (step, degree, states)
        assert len({group[0] for group in groups}) == len(groups), (step, degree, states)


DEGREES = {"ring": 2, "ulysses": 2, "degrees": {12: 1, 36: 2}}


@pytest.mark.parametrize(
    ("world", "kind", "settings", "run"),
    [
        (3, FSDP, {}, {}),
        (2, CP, {"ulysses": 2}, {"loader": {"num_workers": 2}}),
        (4, FSDP, {"ring": 2}, {"checkpointed": True, "loader": {"micro_batch_size": 1}}),
        (4, CP, {**DEGREES, "check_peers": "always"}, {}),
        (4, FSDP, DEGREES, {"checkpointed": True}),
        (3, FSDP, {"ulysses": 3, "degrees": {36: 1}}, {}),
    ],
)
@pytest.mark.default(1)
def test_losses_and_weights_equal_one_process(
    world: int, kind: Any, settings: dict[str, Any], run: dict[str, Any], alone: dict[str, Any], run_ranks: RankPool
) -> None:
    runs = run_ranks(world, _fit, kind, settings, run, init=False)
    _equals(runs, alone)
    if "degrees" in settings:
        assert len(set(runs[0]["degrees"])) > 1
        assert all(one["degrees"] == runs[0]["degrees"] for one in runs)
        _draw_equally(runs)


@pytest.mark.full
def test_degrees_of_batches_of_one_size_equal_one_process(run_ranks: RankPool) -> None:
    run = {"loader": {"mixed": False, "batch_size": 4}}
    (one,) = run_ranks(1, _fit, None, {}, run, init=False)
    runs = run_ranks(4, _fit, FSDP, DEGREES, run, init=False)
    _equals(runs, one)
    assert len(set(runs[0]["degrees"])) > 1


def test_weights_of_samples_are_factors_of_their_losses(run_ranks: RankPool) -> None:
    """The weights of one epoch's samples change every loss; with all weights 0.5, losses are half of those without."""
    run = {"steps": 2, "weights": [1.0, 0.25] * 6 + [2.0]}
    (one,) = run_ranks(1, _fit, None, {}, run, init=False)
    for found in run_ranks(3, _fit, FSDP, {}, run, init=False):
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-8)
    plain, half = (
        run_ranks(1, _fit, None, {}, {"steps": 1, **x}, init=False)[0] for x in ({}, {"weights": [0.5] * 13})
    )
    assert half["losses"][0] == pytest.approx(0.5 * plain["losses"][0], rel=1e-12)
    assert abs(one["losses"][0] / plain["losses"][0] - 1) > 1e-3


@pytest.mark.full
def test_the_mean_over_tokens_equals_one_process(alone: dict[str, Any], run_ranks: RankPool) -> None:
    run = {"loader": {"reduction": "tokens"}}
    (one,) = run_ranks(1, _fit, None, {}, run, init=False)
    assert abs(one["losses"][0] / alone["losses"][0] - 1) > 1e-3
    _equals(run_ranks(4, _fit, CP, {"ring": 2}, run, init=False), one)


@pytest.mark.full
def test_no_sample_is_lost(run_ranks: RankPool) -> None:
    """Each sample of each batch is counted in one group; the order itself loses none, see the test of the sampler."""
    runs = run_ranks(4, _fit, CP, {"ring": 2}, {"steps": 13}, init=False)
    assert runs[1]["positions"] == runs[0]["positions"]
    for first, second in zip(runs[0]["positions"], runs[2]["positions"], strict=True):
        assert sorted([*first, *second]) == list(range(BATCH))
    loaded = {*runs[0]["drawn"], *runs[2]["drawn"]}
    assert loaded >= {(item, epoch) for item in range(13) for epoch in range(5)}


@pytest.mark.full
def test_a_run_resumes_at_another_topology(alone: dict[str, Any], run_ranks: RankPool, tmp_path: Path) -> None:
    saved = tmp_path / "half.ckpt"
    run_ranks(3, _fit, CP, {}, {"steps": 2, "saves": saved}, init=False)
    runs = run_ranks(4, _fit, CP, DEGREES, {"resume": saved}, init=False)
    _equals(runs, alone, start=2)
    assert all(run["batches"] == STEPS for run in runs)
