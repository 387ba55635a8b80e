"""The Trainer's strategy: fit, validate, test and predict against one process on the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_cp.pytorch import ContextParallelStrategy
from tests.dist.lightning_ranks import QUIET, everyones, flat, trainer_of
from tests.dist.module import Clips, TrainsWan
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


def _fit(rank: int, world: int, ring: int, ulysses: int, accumulate: int, shares: list[int] | None) -> float:
    seed_everything(1, verbose=False)
    module, data = TrainsWan(), Clips(16)
    start = flat(module)
    trainer = trainer_of(
        rank,
        world,
        ContextParallelStrategy(ring=ring, ulysses=ulysses, shares=shares),
        max_steps=3,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
    )
    trainer.fit(module, DataLoader(data, batch_size=2))
    strategy = trainer.strategy
    assert isinstance(strategy, ContextParallelStrategy)
    assert strategy.data_size == world // (ring * ulysses)
    assert shares is None or f"shares {':'.join(map(str, shares))}" in next(iter(strategy.context.described))
    assert len(module.seen) == 3 * accumulate
    seen = everyones(module.seen)
    for first in range(0, world, ring * ulysses):
        assert all(peers == seen[first] for peers in seen[first : first + ring * ulysses])
    found = flat(module)

    reference = TrainsWan()
    assert torch.equal(flat(reference), start)
    optimizer = torch.optim.SGD(reference.parameters(), lr=module.lr)
    groups = seen[:: ring * ulysses]
    for step in range(3):
        batches = [group[step * accumulate + part] for part in range(accumulate) for group in groups]
        indices = [index for batch in batches for index in batch]
        batch = next(iter(DataLoader([data[index] for index in indices], batch_size=len(indices))))  # type: ignore[arg-type]
        reference.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = flat(reference)
    assert float((expected - start).norm()) > 1e-2
    return float((found - expected).norm() / (expected - start).norm())


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "accumulate", "shares"),
    [
        pytest.param(2, 2, 1, 1, [2, 1], marks=pytest.mark.full),
        pytest.param(3, 3, 1, 1, None, marks=pytest.mark.full),
        (3, 1, 3, 1, [1, 3, 2]),
        pytest.param(4, 2, 1, 2, None, marks=pytest.mark.full),
        (4, 2, 2, 1, None),
        pytest.param(4, 2, 1, 1, [2, 1], marks=pytest.mark.full),
    ],
)
@pytest.mark.default(1)
def test_fit_is_one_process_on_the_global_batch(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, accumulate: int, shares: list[int] | None
) -> None:
    assert max(run_ranks(world, _fit, ring, ulysses, accumulate, shares, init=False)) < 1e-4


def _evaluate(rank: int, world: int) -> tuple[list[float], list[list[int]], float]:
    module, data = TrainsWan(), Clips(7)
    loader = DataLoader(data, batch_size=2)
    even = DataLoader(Clips(8), batch_size=2)
    batch = next(iter(DataLoader(Clips(8), batch_size=8)))
    with torch.no_grad():
        expected = float(module.loss(batch))
        whole = next(iter(DataLoader(data, batch_size=7)))
        outputs = module.predict_step(whole, 0)[1]
    trainer = trainer_of(rank, world, ContextParallelStrategy(ring=2))
    losses = [trainer.validate(module, even)[0]["val_loss"], trainer.test(module, even)[0]["test_loss"]]
    predicted: Any = trainer.predict(module, loader)
    indices = [index for batch_indices, _ in predicted for index in batch_indices]
    found = torch.cat([out for _, out in predicted])
    error = float((found - outputs[indices]).abs().max())
    return [loss / expected for loss in losses], everyones(indices)[::2], error


def test_evaluation_sees_each_sample_and_predictions_come_once_and_in_order(run_ranks: RankPool) -> None:
    for losses, indices, error in run_ranks(4, _evaluate, init=False):
        assert losses == pytest.approx([1, 1], rel=1e-5)
        assert indices == [[0, 2, 4, 6], [1, 3, 5]]
        assert error < 1e-4


class _Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        yield from Clips(4)


def _stream(rank: int, world: int) -> str:
    trainer = trainer_of(rank, world, "cp", max_steps=1)
    with pytest.raises(ValueError, match="sharded_by_data_rank") as caught:
        trainer.fit(TrainsWan(), DataLoader(_Stream(), batch_size=2))
    return str(caught.value)


class _Shards:
    """A loader of some other library, or a generator."""

    def __iter__(self) -> Any:
        return iter([Clips(4)[0]])


def _other_loader(rank: int, world: int) -> str:
    trainer = trainer_of(rank, world, ContextParallelStrategy(ring=2), max_steps=1)
    with pytest.raises(ValueError, match="data ranks") as caught:
        trainer.fit(TrainsWan(), _Shards())
    return str(caught.value)


def test_a_loader_that_is_no_dataloader_is_not_silently_duplicated(run_ranks: RankPool) -> None:
    for said in run_ranks(4, _other_loader, init=False):
        assert said.startswith("_Shards is iterable")


def test_an_iterable_dataset_is_not_silently_duplicated(run_ranks: RankPool) -> None:
    assert all("_Stream is iterable" in message for message in run_ranks(2, _stream, init=False))


def _named(rank: int, world: int, name: str) -> tuple[int, int, int]:
    trainer = trainer_of(rank, world, name, max_steps=1)
    trainer.fit(TrainsWan(), DataLoader(Clips(4), batch_size=2))
    strategy = trainer.strategy
    assert isinstance(strategy, ContextParallelStrategy)
    assert trainer.train_dataloader is not None
    return strategy.context.ring, strategy.context.ulysses, strategy.data_size


@pytest.mark.parametrize(("name", "place"), [("cp", (1, 1, 2)), ("cp_ring", (2, 1, 1)), ("cp_ulysses", (1, 2, 1))])
@pytest.mark.default(1)
def test_a_name_is_enough(run_ranks: RankPool, name: str, place: tuple[int, int, int]) -> None:
    assert run_ranks(2, _named, name, init=False) == [place, place]


def test_places_are_known_before_the_ranks_are_up() -> None:
    trainer = Trainer(accelerator="cpu", devices=4, strategy=ContextParallelStrategy(ring=2), **QUIET)  # type: ignore[arg-type]
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"ring": 0}, "ring=0"),
        ({"rings": 2}, "ContextParallelStrategy has no setting 'rings': did you mean 'ring'"),
        ({"stall_s": 0}, "stall_s=0"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], names: str) -> None:
    with pytest.raises((ValueError, TypeError), match=names):
        ContextParallelStrategy(**settings)


def test_a_world_that_does_not_fit_is_refused_before_launch() -> None:
    with pytest.raises(ValueError, match="must divide the world size 3"):
        Trainer(accelerator="cpu", devices=3, strategy=ContextParallelStrategy(ring=2), **QUIET)  # type: ignore[arg-type]
