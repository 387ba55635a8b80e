"""Features of a Fabric script: names, meshes, precision, accumulation, loaders, random numbers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.fabric import seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_cp.engine.apply import installed_on
from lightning_cp.errors import PeerMismatchError, PlanError, ShapeError
from lightning_cp.fabric import ContextParallelStrategy
from tests.dist.lightning_ranks import fabric_of
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool
from tests.models import TINY
from tests.models.wan import wan

pytestmark = pytest.mark.filterwarnings("ignore")


def _single(arguments: dict[str, Any], *, precision: str = "32-true") -> tuple[nn.Module, Tensor]:
    """A Wan in float32 and its gradients."""
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)  # of rms_norm
    model = wan().build().float()
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        out = reference(**arguments, return_dict=False)[0]
    out.float().square().mean().backward()
    return model, _gradients(reference)


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _arguments() -> dict[str, Any]:
    return {name: x.float() if x.is_floating_point() else x for name, x in wan().arguments().items()}


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _by_name(rank: int, world: int, name: str) -> tuple[int, int, int, float]:
    model, expected = _single(_arguments())
    fabric = fabric_of(rank, world, name)
    strategy = fabric.strategy
    assert isinstance(strategy, ContextParallelStrategy)
    wrapped = fabric.setup(model)
    fabric.backward(wrapped(**_arguments(), return_dict=False)[0].square().mean())
    ring, ulysses = strategy.context.ring, strategy.context.ulysses
    return ring, ulysses, strategy.data_size, _distance(_gradients(model), expected)


@pytest.mark.parametrize(("name", "degrees"), [("cp", (1, 1, 2)), ("cp_ring", (2, 1, 1)), ("cp_ulysses", (1, 2, 1))])
def test_cp_ring_and_cp_ulysses_use_the_whole_world_as_context(
    run_ranks: RankPool, name: str, degrees: tuple[int, int, int]
) -> None:
    for *found, error in run_ranks(2, _by_name, name, init=False):
        assert tuple(found) == degrees
        assert error < 1e-5


def _on_a_mesh(rank: int, world: int) -> tuple[int, int, int, int]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("ring", "ulysses", "fsdp"))
    fabric = fabric_of(rank, world, ContextParallelStrategy(mesh=mesh))
    strategy = fabric.strategy
    assert isinstance(strategy, ContextParallelStrategy)
    return strategy.context_rank, strategy.context_size, strategy.data_rank, strategy.data_size


def test_places_come_from_the_coordinates_of_a_given_mesh(run_ranks: RankPool) -> None:
    assert run_ranks(4, _on_a_mesh) == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]


def _mixed(rank: int, world: int) -> tuple[float, float]:
    model, exact = _single(_arguments())
    _, single = _single(_arguments(), precision="bf16-mixed")
    fabric = fabric_of(rank, world, ContextParallelStrategy(ring=world), precision="bf16-mixed")
    wrapped = fabric.setup(model)
    assert fabric.strategy.context.described == {  # type: ignore[attr-defined]
        f"{world} ranks = data 1 × ring {world} × ulysses 1; WanTransformer3DModel: 2 blocks, kernel flash"
    }
    fabric.backward(wrapped(**_arguments(), return_dict=False)[0].float().square().mean())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return _distance(_gradients(model), exact), _distance(single, exact)


def test_bf16_mixed_is_as_exact_as_in_one_process(run_ranks: RankPool) -> None:
    for ours, single in run_ranks(3, _mixed, init=False):
        assert 1e-4 < single < 0.1
        assert ours < 1.5 * single


def _accumulated(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    model, expected = _single(_arguments())
    fabric = fabric_of(rank, world, ContextParallelStrategy(ring=world))
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with fabric.no_backward_sync(wrapped):
        fabric.backward(wrapped(**_arguments(), return_dict=False)[0].square().mean() / 2)
    first = _gradients(model).clone()
    fabric.backward(wrapped(**_arguments(), return_dict=False)[0].square().mean() / 2)
    whole = _gradients(model).clone()
    fabric.clip_gradients(wrapped, optimizer, clip_val=1e-3)
    assert float(_gradients(model).abs().max()) <= 1.001e-3
    assert float(fabric.all_reduce(torch.tensor(2.0), reduce_op="sum")) == 2.0  # one data group
    fabric.barrier()
    return first, whole, expected


def test_accumulation_averages_only_in_its_last_step(run_ranks: RankPool) -> None:
    results = run_ranks(3, _accumulated, init=False)
    assert _distance(results[0][0], results[1][0]) > 1e-2  # each rank's own part: nothing was sent
    for _, whole, expected in results:
        assert _distance(whole, expected) < 1e-5


def _unused(rank: int, world: int) -> tuple[float, bool]:
    tiny = TINY["qwen_image"]
    model = tiny.build()
    reference, arguments = copy.deepcopy(model), tiny.arguments()
    reference(**arguments, return_dict=False)[0].square().mean().backward()
    fabric = fabric_of(rank, world, ContextParallelStrategy(ulysses=world), precision="64-true")
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(3):  # plain DDP fails in the second step
        optimizer.zero_grad()
        fabric.backward(wrapped(**arguments, return_dict=False)[0].square().mean())
        optimizer.step()
    unused = any(p.grad is None for p in reference.parameters())
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    found, expected = zip(
        *[(a.flatten(), b.flatten()) for a, b in pairs if a is not None and b is not None], strict=True
    )
    return _distance(torch.cat(found), torch.cat(expected)), unused


def test_parameters_without_gradient_are_no_obstacle(run_ranks: RankPool) -> None:
    for error, unused in run_ranks(2, _unused, init=False):
        assert unused
        assert error < 1e-5


class _Augmented(Dataset[Tensor]):
    """Items with a random part, drawn in the worker."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(1)])


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


def _loaded(rank: int, world: int) -> tuple[list[list[float]], float, str]:
    seed_everything(3, workers=True, verbose=False)
    fabric = fabric_of(rank, world, ContextParallelStrategy(ring=2))
    strategy = fabric.strategy
    assert isinstance(strategy, ContextParallelStrategy)
    loader = fabric.setup_dataloaders(DataLoader(_Augmented(), batch_size=2, shuffle=True, num_workers=1))
    rows = [row.tolist() for batch in loader for row in batch]
    noise = torch.rand(1, generator=strategy.generator(7))
    with pytest.raises(ValueError, match="sharded_by_data_rank") as caught:
        fabric.setup_dataloaders(DataLoader(_Stream()))
    return rows, float(noise), str(caught.value)


def test_context_peers_see_the_same_data_and_data_groups_their_own(run_ranks: RankPool) -> None:
    (first, noise, message), (peer, same_noise, _), (other, other_noise, _), (other_peer, _, _) = run_ranks(
        4, _loaded, init=False, timeout_s=120
    )
    assert first == peer
    assert other == other_peer
    assert {row[0] for row in first}.isdisjoint(row[0] for row in other)
    assert len({row[1] for row in (*first, *other)}) == 12
    assert noise == same_noise != other_noise
    assert "_Stream" in message


def _peers(rank: int, world: int, check_peers: str) -> list[int]:
    """Return which of four forwards raised an error for different arguments."""
    model = wan().build().float()
    fabric = fabric_of(rank, world, ContextParallelStrategy(ring=world, check_peers=check_peers))
    wrapped = fabric.setup(model)
    refused = []
    for forward in range(4):
        arguments = _arguments()
        if forward in (1, 3):
            arguments["encoder_hidden_states"] = arguments["encoder_hidden_states"] * (rank + 1)
        try:
            with torch.no_grad():
                wrapped(**arguments)
        except PeerMismatchError as error:
            refused += [forward] if "encoder_hidden_states" in str(error) else []
    return refused


@pytest.mark.parametrize(("check_peers", "refused"), [("first", [1]), ("always", [1, 3]), ("off", [])])
@pytest.mark.default(1)
def test_differing_peers_are_refused_as_often_as_check_peers_says(
    run_ranks: RankPool, check_peers: str, refused: list[int]
) -> None:
    assert run_ranks(2, _peers, check_peers, init=False) == [refused] * 2


def _selection(rank: int, world: int) -> list[str]:
    told = []
    for settings in ({"plans": {"Plian": PLAIN_PLAN}}, {"modules": ["Plian"]}, {"modules": ["blocks"]}):
        fabric = fabric_of(rank, world, ContextParallelStrategy(ring=world, **settings))
        with pytest.raises(PlanError) as caught:
            fabric.setup(Plain())
        told.append(str(caught.value))
    for settings in ({"modules": [Plain]}, {"modules": ["Plain"]}, {"modules": ["0"]}, {}):
        fabric = fabric_of(rank, world, ContextParallelStrategy(ring=world, plans={"Plain": PLAIN_PLAN}, **settings))
        holder = nn.Sequential(Plain())
        fabric.setup(holder)
        assert installed_on(holder[0]) is not None
    return told


def test_modules_and_plans_are_named_by_class_name_or_path_and_must_be_there(run_ranks: RankPool) -> None:
    for told in run_ranks(2, _selection, init=False):
        assert all("'Plian'" in message for message in told[:2])
        assert "no plan is registered" in told[2]


def _of_the_step(rank: int, world: int, degree: int) -> tuple[bool, list[Any]]:
    """Whether the helpers for shards follow a smaller degree, and this rank's draws: at both degrees, in that order."""
    strategy = ContextParallelStrategy(ring=world, degrees={8: degree})
    fabric_of(rank, world, strategy)
    draws, is_right = [], True
    for size in (world, degree, world):
        strategy.use_degree(None if size == world else degree)
        first, group = rank // size * size, rank // size
        sample = torch.arange(6.0) + 10 * group
        own = strategy.shard({"x": sample}, {"x": 0})["x"].requires_grad_()
        counts = [len(x) for x in torch.tensor_split(sample, size)]
        weighted = strategy.local_mean(own.mean(), len(own))
        is_right &= len(own) == counts[rank - first]
        is_right &= torch.equal(strategy.gather(own, 0), sample)
        is_right &= torch.isclose(weighted, own.mean() * size * len(own) / 6).item()
        is_right &= strategy.all_gather(torch.tensor(group)).tolist() == list(range(world // size))
        is_right &= strategy.all_reduce(torch.tensor(1.0), reduce_op="sum") == world // size
        draws.append(torch.rand(3, generator=strategy.generator(5)).tolist())
    return bool(is_right), draws


def _unlike_shards(rank: int, world: int) -> list[str]:
    strategy, said = ContextParallelStrategy(ring=world), []
    fabric_of(rank, world, strategy)
    x = torch.ones(2, 2 + (rank == world - 1))
    for one, dim in ((x, 0), (x[:, 0].to(torch.int64) if rank else x[:, 0], 0), (x, 2)):
        with pytest.raises((PeerMismatchError, ShapeError)) as caught:
            strategy.gather(one, dim)
        said.append(str(caught.value))
    with pytest.raises(ShapeError, match=r"dim -3 must be a dim of the tensor \(2, "):
        strategy.shard({"x": x}, {"x": -3})
    assert strategy.gather(x, 1).shape == (2, 2 * world + 1)
    return said


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_shards_that_cannot_be_gathered_are_refused_on_every_rank(run_ranks: RankPool, world: int) -> None:
    for shapes, dtypes, dim in run_ranks(world, _unlike_shards, init=False):
        assert "cannot be gathered along dim 0: shards may differ" in shapes
        assert "cannot be gathered along dim 0: shards may differ" in dtypes
        assert dim.startswith("dim 2 must be a dim of the tensor (2, ")


@pytest.mark.parametrize(("world", "degree"), [(2, 1), (3, 1), pytest.param(4, 2, marks=pytest.mark.full)])
def test_helpers_for_shards_follow_the_degree_of_the_step(run_ranks: RankPool, world: int, degree: int) -> None:
    found = run_ranks(world, _of_the_step, degree, init=False)
    assert all(is_right for is_right, _ in found)
    for rank, (_, (largest, smaller, again)) in enumerate(found):
        assert largest == again == found[0][1][0]
        assert smaller == found[rank // degree * degree][1][1]
    assert len({tuple(draws[1]) for _, draws in found}) == world // degree
