"""Ranks with different weights before set-up train as one process does from rank 0's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_cp import fabric, pytorch
from lightning_cp.strategies.initial_weights import share_initial_weights
from tests.dist.lightning_ranks import everyones, fabric_of, flat, trainer_of, whole
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
BY_PLAN = {"plans": {Plain: PLAIN_PLAN}}
STRATEGIES: dict[tuple[str, str], Any] = {
    ("fabric", "cp"): fabric.ContextParallelStrategy,
    ("fabric", "cp_fsdp"): fabric.ContextParallelFSDPStrategy,
    ("trainer", "cp"): pytorch.ContextParallelStrategy,
    ("trainer", "cp_fsdp"): pytorch.ContextParallelFSDPStrategy,
}


_LATE: dict[str, torch.Tensor] = {}  # what a hook of the module loads after set-up, on this rank


class Mixed(LightningModule):
    """A frozen encoder, a parallel transformer, a tied weight, and a buffer that no state dict holds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Linear(16, 16).requires_grad_(requires_grad=False)
        self.plain = Plain()
        self.head, self.tail = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.tail.weight = self.head.weight
        self.register_buffer("scale", torch.rand(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.head(self.plain(self.encoder(x))[0])) * self.scale
        return out

    def training_step(self, x: Tensor, _: int) -> Tensor:
        return self(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_start(self) -> None:
        if _LATE:
            self.load_state_dict(_LATE)


def inputs() -> Tensor:
    return torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(2))


def everything(model: nn.Module) -> Tensor:
    return torch.cat([flat(model), *(buffer.flatten() for buffer in model.buffers())])


def expected() -> Tensor:
    """Rank 0's weights after two steps of one process."""
    model = Mixed(0)
    optimizer = model.configure_optimizers()
    for _ in range(2):
        model(inputs()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return everything(model)


def _unlike(rank: int, how: str) -> Mixed:
    """Weights of a seed for each rank; or weights on rank 0 alone, from the start or later; or in the encoder alone."""
    _LATE.clear()
    if how == "late" and not rank:
        _LATE.update({name: x.detach().clone() for name, x in Mixed(0).state_dict().items()})
    with torch.device("meta") if how == "meta" and rank else nullcontext():
        model = Mixed({"encoder": 0, "late": 1}.get(how, rank))
    if how == "late":  # which no state dict holds
        model.scale.copy_(Mixed(0).scale)
    if how == "encoder" and rank:
        with torch.no_grad():
            model.encoder.weight[rank, rank] += 0.5
    return model


def _trained(rank: int, world: int, flavour: str, kind: str, how: str, settings: dict[str, Any]) -> float:
    reference = expected()
    strategy = STRATEGIES[flavour, kind](ring=settings.pop("ring", world), **BY_PLAN, **settings)
    if flavour == "trainer":
        trainer = trainer_of(rank, world, strategy, max_steps=2)
        model = _unlike(rank, how)
        copies = [inputs()[i] for _ in range(2) for i in range(2)]
        trainer.fit(model, DataLoader(copies, batch_size=2, shuffle=False))  # type: ignore[arg-type]
    else:
        ours = fabric_of(rank, world, strategy)
        model = _unlike(rank, how)
        wrapped, optimizer = ours.setup(model, model.configure_optimizers())
        for _ in range(2):
            ours.backward(wrapped(inputs()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert model.tail.weight is model.head.weight, "tied weights stay tied"
    return float((everything(model) - reference).norm() / reference.norm())


@pytest.mark.parametrize(
    ("flavour", "kind", "how", "world"),
    [
        pytest.param("fabric", "cp", "seeds", 2, marks=pytest.mark.full),
        pytest.param("fabric", "cp", "meta", 3, marks=pytest.mark.full),
        ("fabric", "cp_fsdp", "seeds", 3),
        ("fabric", "cp_fsdp", "meta", 3),
        ("fabric", "cp_fsdp", "encoder", 2),
        ("trainer", "cp", "meta", 2),
        ("trainer", "cp", "late", 3),
        ("trainer", "cp_fsdp", "seeds", 2),
        ("trainer", "cp_fsdp", "meta", 3),
    ],
)
@pytest.mark.default(1)
def test_training_starts_from_the_first_ranks_weights(
    run_ranks: RankPool, flavour: str, kind: str, how: str, world: int
) -> None:
    assert max(run_ranks(world, _trained, flavour, kind, how, {}, init=False)) < 1e-5


@pytest.mark.parametrize("how", [pytest.param("seeds", marks=pytest.mark.full), "meta"])
def test_replicas_of_shards_start_from_the_first_ranks_weights(run_ranks: RankPool, how: str) -> None:
    settings = {"ring": 2, "replicate": 2}
    assert max(run_ranks(4, _trained, "fabric", "cp_fsdp", how, settings, init=False)) < 1e-5


def _by_hand(module: nn.Module, _: Any) -> nn.Module:
    return fully_shard(module)


def test_a_parallelize_fn_shards_the_first_ranks_weights(run_ranks: RankPool) -> None:
    for how in ("seeds", "meta"):
        assert max(run_ranks(2, _trained, "fabric", "cp_fsdp", how, {"parallelize_fn": _by_hand}, init=False)) < 1e-5


def _without_values(rank: int, world: int) -> list[Tensor]:
    """No rank has values: replicated shards and whole children are initialised equally."""
    ours = fabric_of(rank, world, fabric.ContextParallelFSDPStrategy(ring=2, replicate=2, **BY_PLAN))
    with torch.device("meta"):
        model = Mixed(0)
    torch.manual_seed(rank)
    ours.setup_module(model)
    assert isinstance(model.head.weight, DTensor)
    assert not isinstance(model.encoder.weight, DTensor)
    own = torch.cat([model.head.weight.to_local().flatten(), model.encoder.weight.flatten()])
    assert own.isfinite().all()
    return everyones(own.detach())


def test_replicas_that_no_rank_has_values_for_are_initialised_equally(run_ranks: RankPool) -> None:
    zero, one, two, three = run_ranks(4, _without_values, init=False)[0]
    assert torch.equal(zero, two)
    assert torch.equal(one, three)
    assert not torch.equal(zero[:3], one[:3])


def _refused(rank: int, world: int, flaw: str, kind: str) -> str:
    ours = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=world, **BY_PLAN))
    with torch.device("meta") if flaw == "meta" and rank != 1 else nullcontext():
        model = Mixed(0)
    if rank == 1:
        if flaw == "frozen":
            model.head.bias.requires_grad_(requires_grad=False)
        elif flaw == "shape":
            model.head = nn.Linear(3, 5)
        elif flaw == "more":
            model.register_buffer("steps", torch.zeros(()))
    with pytest.raises(ValueError, match="on rank 1") as caught:
        ours.setup(model)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["cp", "cp_fsdp"])
@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ("frozen", "head.bias is (3,) float32 trained on rank 0 and (3,) float32 on rank 1"),
        ("shape", "head.weight is (3, 3) float32 trained on rank 0 and (5, 3) float32 trained on rank 1"),
        ("more", "steps is no such weight on rank 0 and () float32 on rank 1"),
        ("meta", "encoder.weight is on the meta device on rank 0 and initialised on rank 1"),
    ],
)
@pytest.mark.default(1)
def test_ranks_with_different_modules_are_refused_on_every_rank(
    run_ranks: RankPool, kind: str, flaw: str, said: str
) -> None:
    for message in run_ranks(3, _refused, flaw, kind, init=False):
        assert said in message


def _counted(rank: int, world: int) -> tuple[int, int]:
    """Broadcasts for equal weights, and where one of them differs in one bit."""
    import torch.distributed as dist

    sent: list[int] = []
    broadcast = dist.broadcast
    dist.broadcast = lambda x, **settings: sent.append(x.numel()) or broadcast(x, **settings)  # type: ignore[func-returns-value]
    try:
        model = Mixed(0)
        share_initial_weights(model, torch.device("cpu"))
        equal = len(sent)
        if rank == world - 1:
            with torch.no_grad():
                model.scale[0] = torch.nextafter(model.scale[0], torch.tensor(2.0))
        share_initial_weights(model, torch.device("cpu"))
        assert torch.equal(whole(model.scale), Mixed(0).scale)
        return equal, sum(sent)
    finally:
        dist.broadcast = broadcast


def test_only_what_differs_is_sent(run_ranks: RankPool) -> None:
    assert run_ranks(3, _counted) == [(0, 3)] * 3
