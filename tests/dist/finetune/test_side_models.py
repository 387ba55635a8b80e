"""Side models on several ranks: exact gradients with the base frozen, by the proofs and by the strategies."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp import ContextParallelConfig
from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.families import StoredBatch, collate, load_family
from lightning_cp.family_check import topology_proof
from lightning_cp.finetune import SteeredTransformer, freeze_base
from lightning_cp.finetune.family_check import topology
from lightning_cp.objectives import objective_for
from tests.dist.compare import nothing_narrowed
from tests.dist.finetune.test_families import Prepared, prepared
from tests.dist.lightning_ranks import fabric_of
from tests.families.cases import made
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def flux() -> Prepared:
    return prepared("flux_controlnet", (1, 16, 24))


def _proof(rank: int, world: int, given: Prepared, averaged: bool) -> tuple[float, str, list[bool], float]:
    """The largest error, where it is, whether each weight of the base has a gradient, and the ControlNet's largest."""
    model, name, facts, samples = given
    model, family = copy.deepcopy(model), load_family(name, facts)
    config = ContextParallelConfig(ring_degree=world)
    average = topology.average_in_place
    if not averaged:
        topology.average_in_place = lambda *_: None
    try:
        with nothing_narrowed():
            proof = topology_proof(model, family, collate(samples, family.text), config)
    finally:
        topology.average_in_place = average
    assert isinstance(model, SteeredTransformer)
    frozen = [p.grad is not None for p in model.transformer.parameters()]
    largest = max(float(p.grad.abs().max()) for p in model.side.parameters() if p.grad is not None)
    return proof.error, proof.found, frozen, largest


def test_gradients_of_a_side_model_are_exact_and_the_base_has_none(flux: Prepared, run_ranks: RankPool) -> None:
    for error, found, frozen, largest in run_ranks(3, _proof, flux, True):
        assert error < 1e-12, found
        assert not any(frozen)
        assert largest > 0


@pytest.mark.full
def test_gradients_that_are_not_averaged_are_found(flux: Prepared, run_ranks: RankPool) -> None:
    for error, found, _, _ in run_ranks(3, _proof, flux, False):
        assert error > 0.1
        assert found.startswith("gradient controlnet.")


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().double().clone()


def _trained(
    rank: int, world: int, given: Prepared, strategy: Any, base: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after two steps."""
    model, name, facts, samples = given
    family = load_family(name, facts)
    model = copy.deepcopy(model)
    assert isinstance(model, SteeredTransformer)
    model.transformer.to(base)
    freeze_base(model, family)
    before = {name: _full(p) for name, p in model.named_parameters()}
    if strategy is not None:
        kind, degrees = strategy
        strategy = kind(**degrees)
    fabric = fabric_of(rank, world, strategy or "auto", precision=None)
    trained = [p for p in model.parameters() if p.requires_grad]
    module: nn.Module
    module, optimizer = fabric.setup(model, torch.optim.SGD(trained, lr=0.5))
    objective = objective_for(family, seed=0, loss_dtype=torch.float64)
    batch: StoredBatch = collate(samples, family.text)
    with nothing_narrowed() if base == torch.float64 else nullcontext():
        for step in range(2):
            fabric.backward(objective.loss(module, family, batch, step=step, first_index=0))
            optimizer.step()
            optimizer.zero_grad()
    return before, {name: _full(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("blocks", "kind", "degrees", "base"),
    [
        ("double", ContextParallelStrategy, {"ring": 3}, torch.float64),
        ("both_kinds", ContextParallelFSDPStrategy, {"ring": 2}, torch.bfloat16),
    ],
    ids=["ring3", "cp_fsdp_and_half_precision_base"],
)
@pytest.mark.full
def test_a_strategy_trains_the_side_model_as_one_process_does(
    blocks: str, kind: type, degrees: dict[str, int], base: torch.dtype, flux: Prepared, run_ranks: RankPool
) -> None:
    given = flux
    if blocks == "double":  # the last block's text has no gradient
        control = copy.deepcopy(made("flux_controlnet_double").controlnet).double().train()
        rule = flux[0].rule
        assert isinstance(flux[0], SteeredTransformer)
        given = (SteeredTransformer(flux[0].transformer, control, rule), *flux[1:])
    world = degrees.get("ring", 1) * degrees.get("ulysses", 1)
    ((before, alone),) = run_ranks(1, _trained, given, None, base, timeout_s=120)
    exact = base == torch.float64
    for _, weights in run_ranks(world, _trained, given, (kind, degrees), base, timeout_s=120):
        assert weights.keys() == alone.keys()
        for name, x in weights.items():
            if name.startswith("controlnet."):
                torch.testing.assert_close(x, alone[name], rtol=0, atol=1e-13 if exact else 1e-2)
            else:
                assert torch.equal(x, before[name]), name
    changed = {name for name, x in alone.items() if not torch.equal(x, before[name])}
    assert any(name.startswith("controlnet.controlnet_x_embedder") for name in changed)
    assert any(name.startswith("controlnet.transformer_blocks.0") for name in changed)
