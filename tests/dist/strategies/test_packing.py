"""Several samples in one row: losses and gradients are those of the samples alone, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cp import SparseMask, apply_context_parallel, context_parallel_attention
from lightning_cp.attention.sparse import balanced_order
from lightning_cp.config import ContextParallelConfig
from lightning_cp.data import PackedBatches, PackedCollate
from lightning_cp.errors import ShapeError
from tests.dist.compare import nothing_narrowed
from tests.dist.lightning_ranks import STRATEGIES, fabric_of, trainer_of
from tests.harness import RankPool
from tests.models import TINY

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = [(11, 4), (3, 1), (17, 2), (6, 5), (4, 2)]  # tokens of image and text: uneven shards at 2, 3 and 4 ranks
COLLATE = PackedCollate({"image": ["latents", "ids", "target"], "text": ["prompt"]}, max_tokens=55)
WIDTH, HEADS = 16, 4
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def samples() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(3)
    randn = partial(torch.randn, generator=g, dtype=torch.float64)
    return [
        {
            "latents": randn(image, 5),
            "target": randn(image, 5),
            "ids": torch.randint(0, 50, (image,), generator=g),
            "prompt": randn(text, 7),
            "time": randn(()),
        }
        for image, text in SIZES
    ]


class Block(nn.Module):
    """Attention over image and text together, with modulation and positions for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor, time: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        shift, gate = self.modulation(time).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x + shift).chunk(3, -1))
        q, k = (torch.cat([y[..., ::2] * angles.cos() - y[..., 1::2] * angles.sin(), y], -1) for y in (q, k))
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        x = x + gate * self.out(attend(q, k, v)[..., : WIDTH // HEADS].flatten(2))
        return x + gate * self.mlp(x)


class Joint(nn.Module):
    """A transformer of two modalities, with a time and a position for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.time = nn.Linear(5, WIDTH), nn.Linear(7, WIDTH), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, row: dict[str, Tensor], attend: Attend) -> Tensor:
        x = torch.cat([self.image(row["latents"]), self.text(row["prompt"])], 1)
        documents = torch.cat([row["image_documents"], row["text_documents"]], 1)
        time = self.time(row["time"][documents].unsqueeze(-1))
        ids = F.pad(row["ids"], (0, row["prompt"].shape[1]))
        angles = (ids[:, :, None] * torch.tensor([0.3, 0.07], dtype=torch.float64)).unsqueeze(2)
        for block in self.blocks:
            x = block(x, time, angles, attend)
        return self.out(x[:, : row["latents"].shape[1]])


def alone(model: Joint, sample: dict[str, Tensor], collate: PackedCollate = COLLATE) -> Tensor:
    """The loss of one sample, with torch's attention."""
    row = collate([sample])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return F.mse_loss(model(row, attend), row["target"])


def packed(model: Any, row: dict[str, Tensor], strategy: Any, balanced: bool) -> Tensor:
    """The mean loss of the samples in a row: each rank computes its tokens."""
    order = None
    if balanced:
        order = balanced_order(SparseMask.from_documents(row["image_documents"], block_size=4), strategy.context_size)
    row = strategy.shard(strategy.shard(row, COLLATE.dims("image"), order), COLLATE.dims("text"))
    own = torch.cat([row["image_documents"], row["text_documents"]], 1)
    mask = SparseMask.from_documents(strategy.gather(own, 1), block_size=4)
    attend = partial(context_parallel_attention, block_mask=mask, parallel_config=strategy.context.config)
    error = (model(row, attend) - row["target"]).square().mean(-1)
    lengths = row["image_lengths"]
    weights = lengths.sum() / (len(lengths) * lengths[row["image_documents"]].double())
    loss: Tensor = strategy.local_mean((error * weights).mean(), error.shape[1])
    return loss


def _compare(rank: int, world: int, ring: int, ulysses: int, shares: list[int] | None, balanced: bool) -> float:
    """The largest error of the loss, of all gradients and of a gathered output."""
    strategy = STRATEGIES["fabric", "cp"](
        ring=ring, ulysses=ulysses, shares=shares if shares and ulysses == 1 else None
    )
    fabric = fabric_of(rank, world, strategy, precision="64-true")
    torch.manual_seed(0)
    model = Joint().double()
    loss = torch.stack([alone(model, sample) for sample in samples()]).mean()
    loss.backward()
    expected_loss = loss.detach()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    wrapped, row = fabric.setup(model), COLLATE(samples())
    with mock.patch.object(torch, "get_default_dtype", return_value=torch.float64):  # to which Fabric casts outputs
        loss = packed(wrapped, row, strategy, balanced)
    fabric.backward(loss)
    errors = [(strategy.gather(loss.detach()[None], 0).mean() - expected_loss).abs()]
    errors += [(p.grad - expected[name]).abs().max() for name, p in model.named_parameters() if p.grad is not None]
    assert len(errors) == len(expected) + 1
    assert min(x.abs().max() for x in expected.values()) > 1e-4
    if balanced:
        order = balanced_order(SparseMask.from_documents(row["image_documents"], block_size=4), world)
        assert (order is None) == (world < 3)
        shard = strategy.shard(row, COLLATE.dims("image"), order)
        for name in COLLATE.dims("image"):
            assert strategy.gather(shard[name], 1, order).equal(row[name])
            assert order is None or not strategy.gather(shard[name], 1).equal(row[name])
    return float(max(errors))


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "shares", "balanced"),
    [(3, 3, 1, None, True), (4, 2, 2, None, False), (3, 3, 1, [1, 3, 2], True)],
)
@pytest.mark.default(1)
def test_a_row_gives_the_loss_and_gradients_of_its_samples_alone(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, shares: list[int] | None, balanced: bool
) -> None:
    assert max(run_ranks(world, _compare, ring, ulysses, shares, balanced, init=False)) < 1e-12


class TrainsJoint(LightningModule):
    """Trains on rows of several samples. `rows`: number of samples of each."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.rows = Joint().double(), list[int]()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.rows.append(len(batch["image_lengths"]))
        return packed(self.model, batch, self.trainer.strategy, balanced=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _train(rank: int, world: int) -> float:
    """The largest error of a weight after an epoch of rows in two data groups, to one process on the samples alone."""
    torch.manual_seed(0)
    module, reference = TrainsJoint(), Joint().double()
    reference.load_state_dict(module.model.state_dict())
    rows = PackedBatches([sum(size) for size in SIZES], max_tokens=24)
    data: Any = samples()
    trainer = trainer_of(rank, world, STRATEGIES["trainer", "cp"](ring=2), precision="64-true", max_epochs=1)
    trainer.fit(module, DataLoader(data, batch_sampler=rows, collate_fn=COLLATE))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in ([[0, 1], [2]], [[3, 4], [0, 1]]):
        for row in step:
            (torch.stack([alone(reference, data[i]) for i in row]).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert module.rows == [[2, 2], [1, 2]][rank // 2]
    pairs = zip(module.model.parameters(), reference.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


@pytest.mark.full
def test_the_trainer_trains_on_rows_like_on_the_samples(run_ranks: RankPool) -> None:
    assert max(run_ranks(4, _train, init=False)) < 1e-12


def _transformer(rank: int, world: int) -> float:
    """A transformer of diffusers on a row of two samples, against each sample alone in one process."""
    arguments = TINY["ideogram4_per_token_timestep"].arguments()
    names = [name for name in arguments if name != "segment_ids"]
    first, second = ({name: arguments[name][0, tokens] for name in names} for tokens in (slice(0, 10), slice(10, 23)))
    collate = PackedCollate({"image": names}, model=TINY["ideogram4"].build())
    model = TINY["ideogram4"].build()

    def run(parts: list[dict[str, Tensor]]) -> Tensor:
        row = collate(parts)
        inputs = {name: row[name] for name in names}
        out: Tensor = model(**inputs, segment_ids=row["image_documents"], return_dict=False)[0]
        return out

    with nothing_narrowed():
        expected = torch.cat([run([first]), run([second])], 1)
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        parameters = list(model.parameters())
        gradients = torch.autograd.grad((expected * weight).sum(), parameters)
        if world > 1:
            apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
        found = run([first, second])
        errors = [(found - expected).detach().abs().max()]
        for x, y in zip(torch.autograd.grad((found * weight).sum(), parameters), gradients, strict=True):
            if world > 1:
                torch.distributed.all_reduce(x)
            errors.append((x / world - y).abs().max() / max(float(y.abs().max()), 1.0))
    return float(max(errors))


def test_a_transformer_with_a_time_for_each_token_takes_a_row_of_samples(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _transformer)) < 1e-12


def _refusals(rank: int, world: int) -> list[str]:
    strategy = STRATEGIES["fabric", "cp"](ring=world)
    fabric_of(rank, world, strategy)
    found = []
    for order in (torch.arange(6), torch.tensor([0, 1, 2, 3, 4, 5, 5])):
        for call in (
            lambda order: strategy.shard({"x": torch.zeros(1, 7)}, {"x": 1}, order),
            lambda order: strategy.gather(torch.zeros(1, 4 - rank), 1, order),
        ):
            with pytest.raises(ShapeError) as caught:
                call(order)
            found.append(str(caught.value))
    return found


def test_an_order_must_hold_each_token_once(run_ranks: RankPool) -> None:
    for found in run_ranks(2, _refusals, init=False):
        assert len(found) == 4
        assert all("must hold each position from 0 to 6 once" in line for line in found)
