"""Topology: a family's loss and gradients on several ranks are those of one process, also in a user's own module."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.fabric import ContextParallelStrategy as FabricStrategy
from lightning_cp.families import Facts, Sample, StoredBatch, collate, family_for, load_family
from lightning_cp.family_check import store, topology_proof, training_models
from lightning_cp.objectives import objective_for
from lightning_cp.pytorch import ContextParallelFSDPStrategy, ContextParallelStrategy
from tests.dist.compare import nothing_narrowed
from tests.dist.lightning_ranks import fabric_of, flat, trainer_of
from tests.families.cases import CASES, made, media
from tests.families.report import record
from tests.harness import RankPool
from tests.harness.cases import grouped, in_turn
from tests.pipelines import PIPES

pytestmark = pytest.mark.filterwarnings("ignore")
PIPELINES = list({case.pipe: name for name, case in reversed(CASES.items())}.values())  # the first case of each
TRIALS = grouped(in_turn(PIPELINES, [(3, 1), (1, 2), (2, 2)]), lambda trial: trial[0].partition("_")[0])
TEXTS = ["a cat", "two green birds fly over it", "rain", "a dog sleeps"]
Prepared = tuple[nn.Module, str, Facts, list[Sample]]


def prepared(name: str, size: tuple[int, int, int], number: int = 2) -> Prepared:
    """A tiny transformer in float64, its family, and stored samples."""
    torch.manual_seed(0)
    pipe = PIPES[name].make()
    family = family_for(pipe)
    pixels = torch.rand(number, 3, *size) * 2 - 1
    media = {"pixels": pixels, "reference": pixels[:, :, :1]}
    model = training_models(pipe, family)[0].double().train()
    return model, family.name, family.facts, store(family, pipe, TEXTS[:number], media)


@pytest.fixture(scope="module")
def flux() -> Prepared:
    return prepared("flux", (1, 16, 24))


def _topology(rank: int, world: int, given: Prepared, ring: int, ulysses: int) -> tuple[float, str]:
    transformer, name, facts, samples = given
    family = load_family(name, facts)
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    with nothing_narrowed():
        proof = topology_proof(transformer, family, collate(samples, family.text), config)
    return proof.error, proof.found


@pytest.mark.parametrize(("ring", "ulysses"), [(3, 1), (1, 2)])
@pytest.mark.default(1)
def test_loss_and_gradients_are_those_of_one_process(
    ring: int, ulysses: int, flux: Prepared, run_ranks: RankPool
) -> None:
    (found,) = set(run_ranks(ring * ulysses, _topology, flux, ring, ulysses))
    assert found[0] < 1e-12, found


@pytest.mark.full
@pytest.mark.parametrize("trials", TRIALS.values(), ids=TRIALS)
def test_topology_of_every_family(trials: list[tuple[str, tuple[int, int]]], run_ranks: RankPool) -> None:
    for case, degrees in trials:
        torch.manual_seed(0)
        pipe = made(case)
        family = family_for(pipe)
        model = copy.deepcopy(training_models(pipe, family)[0]).double().train()
        given = model, family.name, family.facts, store(family, pipe, CASES[case].captions[:2], media(case))
        (found,) = set(run_ranks(math.prod(degrees), _topology, given, *degrees, timeout_s=120))
        record(family.name, type(pipe).__name__, case, "ranks", found[0])
        assert found[0] < 1e-12, (case, found)


class FineTuning(LightningModule):
    """A module as a user writes it."""

    def __init__(self, transformer: nn.Module, family: Any) -> None:
        super().__init__()
        self.transformer, self.family = transformer, family
        self.objective = objective_for(family, seed=0)
        self.losses: list[float] = []

    def training_step(self, batch: StoredBatch, _: int) -> Tensor:
        loss = self.objective.loss(self.transformer, self.family, batch, step=self.global_step)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(rank: int, world: int, given: Prepared, strategy: Any) -> tuple[list[float], Tensor]:
    transformer, name, facts, samples = given
    family = load_family(name, facts)
    batches = DataLoader(samples, batch_size=2, collate_fn=lambda x: collate(x, family.text))  # type: ignore[arg-type]
    module = FineTuning(copy.deepcopy(transformer), family)
    if isinstance(strategy, tuple):
        kind, degrees = strategy
        strategy = kind(**degrees)
    trainer_of(rank, world, strategy, max_epochs=1).fit(module, batches)
    return module.losses, flat(module.transformer)


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [(ContextParallelStrategy, {"ring": 2, "ulysses": 2}), (ContextParallelFSDPStrategy, {"ring": 2})],
    ids=["unified", "cp_fsdp"],
)
@pytest.mark.default(1)
def test_a_module_of_a_user_trains_as_in_one_process(kind: type, degrees: dict[str, int], run_ranks: RankPool) -> None:
    given = prepared("wan", (5, 32, 48), number=4)
    ((losses, weights),) = run_ranks(1, _fit, given, "auto", timeout_s=120)
    world = degrees.get("ring", 1) * degrees.get("ulysses", 1)
    for losses_here, weights_here in run_ranks(world, _fit, given, (kind, degrees), timeout_s=120):
        assert losses_here == pytest.approx(losses, rel=1e-6)
        assert torch.allclose(weights_here, weights, atol=1e-6)
    assert losses[0] != losses[1]


def _wrong_topology(rank: int, world: int, given: Prepared, mistake: str) -> tuple[bool, str]:
    transformer, name, facts, samples = given
    family = load_family(name, facts)

    class Wrong(type(family)):  # type: ignore[misc]
        """Scales the prediction, or only its gradient, on one of several ranks."""

        name = "wrong"

        def prediction(self, output: Tensor, noisy: Tensor) -> Tensor:
            right: Tensor = super().prediction(output, noisy)
            if rank == 0 or not self.parallel:
                return right
            return 1.01 * right if mistake == "prediction" else right.detach() + 0.9 * (right - right.detach())

        def inputs(self, *args: Any) -> dict[str, Any]:
            self.parallel = next(self.runs)
            inputs: dict[str, Any] = super().inputs(*args)
            return inputs

    wrong = Wrong(facts)
    wrong.runs = iter((False, True))  # topology_proof runs one process's model first
    proof = topology_proof(transformer, wrong, collate(samples, family.text), ContextParallelConfig(ring_degree=world))
    return proof.passed, proof.found


@pytest.mark.full
@pytest.mark.parametrize("mistake", ["gradient", "prediction"])
def test_the_topology_proof_finds_ranks_that_differ(mistake: str, flux: Prepared, run_ranks: RankPool) -> None:
    ((passed, found),) = set(run_ranks(3, _wrong_topology, flux, mistake))
    assert not passed
    assert found


def _half_precision(rank: int, world: int, given: Prepared) -> tuple[bool, float]:
    transformer, name, facts, samples = given
    family = load_family(name, facts)
    half = copy.deepcopy(transformer).bfloat16()
    proof = topology_proof(half, family, collate(samples, family.text), ContextParallelConfig(ring_degree=world))
    return proof.passed, proof.error


def test_the_topology_proof_compares_half_precision_weights_in_float32(flux: Prepared, run_ranks: RankPool) -> None:
    ((passed, error),) = set(run_ranks(3, _half_precision, flux))
    assert passed, error


def _first_indices(rank: int, world: int, given: Prepared) -> list[float]:
    """The loss of this data rank's half of a batch, with the transformer inside of several wrappers."""
    from peft import LoraConfig, get_peft_model
    from torch.nn.parallel import DistributedDataParallel

    transformer, name, facts, samples = given
    family = load_family(name, facts)
    objective = objective_for(family, seed=0)
    whole = objective.sample_losses(transformer, family, collate(samples, family.text), step=1, first_index=0)
    fabric = fabric_of(rank, world, FabricStrategy(ring=3), precision="64-true")
    parallel = copy.deepcopy(transformer)
    apply_context_parallel(parallel, ContextParallelConfig(ring_degree=3))
    half = rank // 3  # 6 ranks = data 2 x ring 3
    mine = collate(samples[half : half + 1], family.text)
    lora = get_peft_model(copy.deepcopy(parallel), LoraConfig(target_modules=["to_q"]))
    set_up = fabric.setup(copy.deepcopy(transformer))
    wrapped = (parallel, DistributedDataParallel(parallel), set_up, lora)
    losses = [objective.loss(module, family, mine, step=1).item() for module in wrapped]
    return [loss / whole[half].item() for loss in losses]


@pytest.mark.full
def test_the_data_rank_is_found_inside_of_wrappers(flux: Prepared, run_ranks: RankPool) -> None:
    for ratios in run_ranks(6, _first_indices, flux, timeout_s=120):
        assert ratios == pytest.approx([1.0] * 4, rel=1e-6)


def _times(rank: int, world: int, given: Prepared, strategy: Any, precision: Any) -> list[Tensor]:
    """The times that the transformer is given, and the dtype of its latents."""
    transformer, name, facts, samples = given
    family = load_family(name, facts)
    module = FineTuning(copy.deepcopy(transformer).float(), family)
    seen: list[Tensor] = []
    module.transformer.register_forward_pre_hook(
        lambda _, __, arguments: seen.append(arguments["timestep"].clone()), with_kwargs=True
    )
    batches = DataLoader(samples, batch_size=2, collate_fn=lambda x: collate(x, family.text))  # type: ignore[arg-type]
    kind, degrees = strategy
    trainer_of(rank, world, kind(**degrees), max_epochs=1, precision=precision).fit(module, batches)
    return seen


def _times_with_fabric(rank: int, world: int, given: Prepared, strategy: Any, precision: Any) -> list[Tensor]:
    """The times that the transformer is given when it is set up by Fabric itself."""
    transformer, name, facts, samples = given
    family = load_family(name, facts)
    seen: list[Tensor] = []
    module = copy.deepcopy(transformer).float()
    kind, degrees = strategy
    fabric = fabric_of(rank, world, kind(**degrees), precision=precision)
    set_up = fabric.setup(module)
    module.register_forward_pre_hook(
        lambda _, __, arguments: seen.append(arguments["timestep"].clone()), with_kwargs=True
    )
    loss = objective_for(family, seed=0).loss(set_up, family, collate(samples, family.text), step=0)
    fabric.backward(loss)
    assert all(p.grad is not None for p in module.parameters())
    return seen


@pytest.mark.parametrize(
    ("train", "kind", "precision"),
    [
        (_times_with_fabric, FabricStrategy, "bf16-mixed"),
        (_times_with_fabric, FabricStrategy, "bf16-true"),
        (_times, ContextParallelFSDPStrategy, "bf16-true"),
    ],
)
@pytest.mark.default(1)
def test_times_reach_the_transformer_unrounded(train: Any, kind: type, precision: str, run_ranks: RankPool) -> None:
    given = prepared("wan", (5, 32, 48), number=2)
    _, name, facts, samples = given
    family = load_family(name, facts)
    noised = objective_for(family, seed=0).noised(family, collate(samples, family.text), step=0)
    for (seen,) in run_ranks(3, train, given, (kind, {"ring": 3}), precision, timeout_s=120):
        assert seen.dtype == torch.float32
        assert torch.equal(seen, (noised.times.double() * 1000).float())
