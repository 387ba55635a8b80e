"""Fabric's strategy: gradients after `fabric.backward` against one process on the global batch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.fabric import ContextParallelStrategy
from tests.harness import RankPool
from tests.harness.cases import full_unless
from tests.models.wan import wan


def _fabric(rank: int, world: int, **settings: object) -> Fabric:
    """Return a Fabric on the ranks of the pool, with the environment of a launcher."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank), WORLD_SIZE=str(world))
    fabric = Fabric(accelerator="cpu", devices=world, strategy=ContextParallelStrategy(**settings))  # type: ignore[arg-type]
    fabric.launch()
    return fabric


def _train(
    rank: int, world: int, ring: int, ulysses: int, folder: str, rotate: str = "allgather"
) -> tuple[float, tuple[int, int, int]]:
    model = wan().build().float()
    arguments = {
        "hidden_states": torch.randn(4, 4, 3, 6, 10, generator=torch.Generator().manual_seed(2)),
        "encoder_hidden_states": torch.randn(4, 7, 16, generator=torch.Generator().manual_seed(3)),
        "timestep": torch.tensor([4, 9, 44, 700]),
    }
    model(**arguments, return_dict=False)[0].square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()

    fabric = _fabric(rank, world, ring=ring, ulysses=ulysses, rotate_method=rotate)
    strategy = fabric.strategy
    assert isinstance(strategy, ContextParallelStrategy)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = 4 // strategy.data_size
    mine = slice(strategy.data_rank * share, (strategy.data_rank + 1) * share)
    for half in range(2):  # accumulation: no averaging on the first
        with fabric.no_backward_sync(wrapped, enabled=half == 0):
            out = wrapped(**{name: x[mine] for name, x in arguments.items()}, return_dict=False)[0]
            fabric.backward(out.square().mean() / 2)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    norm = fabric.clip_gradients(wrapped, optimizer, max_norm=1e9)
    assert norm is not None
    assert abs(float(norm) / float(expected.norm()) - 1) < 1e-5
    optimizer.step()
    path = Path(folder) / "checkpoint"
    state = {"model": wrapped, "optimizer": optimizer}
    fabric.save(path, state)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fabric.load(path, state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert fabric.broadcast(rank) == 0
    error = float((found - expected).norm() / expected.norm())
    return error, (strategy.data_rank, strategy.data_size, strategy.context_rank)


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "rotate"),
    full_unless(
        lambda world, ring, ulysses, rotate: (world, ring) not in ((2, 2), (4, 4)) and (ring, ulysses) != (2, 2),
        [*((*x, "allgather") for x in ((3, 3, 1), (3, 1, 3), (4, 2, 1), (2, 2, 1), (4, 2, 2))), (4, 4, 1, "grid")],
    ),
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.default(1)
def test_gradients_are_those_of_one_process_on_the_global_batch(
    run_ranks: RankPool, tmp_path: Path, world: int, ring: int, ulysses: int, rotate: str
) -> None:
    results = run_ranks(world, _train, ring, ulysses, str(tmp_path), rotate, init=False)
    context = ring * ulysses
    for rank, (error, place) in enumerate(results):
        assert error < 1e-5
        assert place == (rank // context, world // context, rank % context)


class _Attention(nn.Module):
    """A plain module that calls attention itself, on shards."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, config: ContextParallelConfig) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, 4)) for y in self.qkv(x).chunk(3, -1))
        return self.out(context_parallel_attention(q, k, v, parallel_config=config).flatten(2))


def _local_loss(rank: int, world: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model, x = _Attention(), torch.randn(2, 7, 16)
    model(x, ContextParallelConfig()).square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    fabric = _fabric(rank, world, ring=world)
    strategy = fabric.strategy
    assert isinstance(strategy, ContextParallelStrategy)
    wrapped = fabric.setup(model)
    shard = strategy.shard({"batch": {"x": x}, "label": 3}, {"x": 1})["batch"]["x"]
    out = wrapped(shard, ContextParallelConfig(ring_degree=world))
    whole = strategy.gather(out, 1)
    assert whole.shape == x.shape
    fabric.backward(strategy.local_mean(out.square().mean(), shard.shape[1]))
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return float((found - expected).norm() / expected.norm()), float(whole.detach().square().sum())


@pytest.mark.filterwarnings("ignore")
def test_a_plain_module_on_shards_trains_with_one_process_gradients(run_ranks: RankPool) -> None:
    results = run_ranks(3, _local_loss, init=False)
    assert max(error for error, _ in results) < 1e-5
    assert len({total for _, total in results}) == 1


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"ring": 0}, "ring=0"),
        ({"ring": -1}, "ring=-1"),
        ({"ulysses": 1.5}, "ulysses=1.5"),
        ({"rotate_method": "spiral"}, "rotate_method='spiral'"),
        ({"kernel": "magic"}, "kernel='magic'"),
        ({"check_peers": "sometimes"}, "check_peers='sometimes'"),
        ({"data_parallel": 0}, "data_parallel=0"),
        ({"rings": 2}, "no setting 'rings': did you mean 'ring'"),
        ({"plans": ["Plain"]}, r"plans=\['Plain'\] must be a dict"),
        ({"modules": "transformer"}, "modules='transformer' must be a list"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, object], names: str) -> None:
    with pytest.raises((ValueError, TypeError), match=names):
        ContextParallelStrategy(**settings)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_a_world_that_does_not_fit_is_refused_before_launch() -> None:
    with pytest.raises(ValueError, match="must divide the world size 3"):
        Fabric(accelerator="cpu", devices=3, strategy=ContextParallelStrategy(ring=2)).strategy._configure_launcher()


@pytest.mark.filterwarnings("ignore")
def test_the_strategy_is_registered_by_name() -> None:
    strategy = Fabric(accelerator="cpu", devices=2, strategy="cp_ring").strategy
    assert isinstance(strategy, ContextParallelStrategy)
