"""Sharded weights: gradients, norms and weights against one process on the global batch, in both flavours."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.pytorch import ContextParallelFSDPStrategy as TrainersStrategy
from tests.dist.lightning_ranks import QUIET, everyones, fabric_of, flat, present_rank, trainer_of, whole
from tests.dist.module import Clips, TrainsWan
from tests.harness import RankPool
from tests.models.wan import wan

pytestmark = pytest.mark.filterwarnings("ignore")
ARGUMENTS = {
    "hidden_states": torch.randn(4, 4, 3, 6, 10, generator=torch.Generator().manual_seed(2)),
    "encoder_hidden_states": torch.randn(4, 7, 16, generator=torch.Generator().manual_seed(3)),
    "timestep": torch.tensor([4, 9, 44, 700]),
}


def held_bytes(module: nn.Module) -> int:
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() * p.element_size() for p in module.parameters())


def _train(rank: int, world: int, settings: dict[str, Any]) -> dict[str, float]:
    reference = wan().build().float()
    reference(**ARGUMENTS, return_dict=False)[0].square().mean().backward()
    expected, whole_bytes = flat(reference, gradients=True), held_bytes(reference)
    strategy = ContextParallelFSDPStrategy(**settings)
    fabric = fabric_of(rank, world, strategy)
    model = wan().build().float()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    share = 4 // strategy.data_size
    mine = slice(strategy.data_rank * share, (strategy.data_rank + 1) * share)
    for half in range(2):
        with fabric.no_backward_sync(wrapped, enabled=half == 0):
            out = wrapped(**{name: x[mine] for name, x in ARGUMENTS.items()}, return_dict=False)[0]
            fabric.backward(out.square().mean() / 2)
    found = flat(model, gradients=True)
    norm = fabric.clip_gradients(wrapped, optimizer, max_norm=0.5, error_if_nonfinite=False)
    optimizer.step()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    return {
        "gradient": float((found - expected).norm() / expected.norm()),
        "norm": abs(float(whole(norm)) / float(expected.norm()) - 1),
        "weights": float((flat(model) - flat(reference)).norm() / flat(reference).norm()),
        "share": held_bytes(model) / whole_bytes,
        "data": strategy.data_size,
    }


@pytest.mark.parametrize(
    ("world", "settings", "data", "holders"),
    [
        pytest.param(2, {"ring": 2}, 1, 2, marks=pytest.mark.full),
        (3, {"ring": 3}, 1, 3),
        pytest.param(4, {"ring": 2, "ulysses": 2}, 1, 4, marks=pytest.mark.full),
        pytest.param(4, {"ring": 2}, 2, 4, marks=pytest.mark.full),
        (4, {"ring": 2, "replicate": 2}, 2, 2),
    ],
)
@pytest.mark.default(1)
def test_gradients_are_those_of_one_process_and_weights_are_shared(
    run_ranks: RankPool, world: int, settings: dict[str, Any], data: int, holders: int
) -> None:
    for found in run_ranks(world, _train, settings, init=False):
        assert found["data"] == data
        assert found["gradient"] < 1e-5
        assert found["norm"] < 1e-5
        assert found["weights"] < 1e-5
        assert found["share"] < 1 / holders + 0.1


def _fit(rank: int, world: int, settings: dict[str, Any], accumulate: int) -> float:
    present_rank(rank, world)
    module, data = TrainsWan(), Clips(16)
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=TrainersStrategy(**settings),
        max_steps=3,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        **QUIET,  # type: ignore[arg-type]
    )
    trainer.fit(module, DataLoader(data, batch_size=2))
    assert all(isinstance(p, DTensor) for p in module.parameters())
    found, seen = flat(module), everyones(module.seen)
    trainer.validate(module, DataLoader(data, batch_size=2), verbose=False)

    reference = TrainsWan()
    start, optimizer = flat(reference), torch.optim.SGD(reference.parameters(), lr=module.lr)
    for step in range(3):
        groups = seen[:: trainer.strategy.context_size]  # type: ignore[attr-defined]
        parts = range(step * accumulate, (step + 1) * accumulate)
        indices = [index for part in parts for group in groups for index in group[part]]
        batch = next(iter(DataLoader([data[index] for index in indices], batch_size=len(indices))))  # type: ignore[arg-type]
        reference.loss(batch).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = flat(reference)
    return float((found - expected).norm() / (expected - start).norm())


@pytest.mark.parametrize(
    ("world", "settings", "accumulate"),
    [
        pytest.param(2, {"ring": 2}, 1, marks=pytest.mark.full),
        pytest.param(4, {"ulysses": 2}, 1, marks=pytest.mark.full),
        (4, {"ring": 2}, 2),
    ],
)
@pytest.mark.full
def test_the_trainer_fits_as_one_process(
    run_ranks: RankPool, world: int, settings: dict[str, Any], accumulate: int
) -> None:
    assert max(run_ranks(world, _fit, settings, accumulate, init=False)) < 1e-4


def _unlike(rank: int, world: int) -> tuple[float, float]:
    """Ranks that made other weights, and a use of no_backward_sync that must not outlast it."""
    strategy = ContextParallelFSDPStrategy(ring=2, replicate=2)
    fabric = fabric_of(rank, world, strategy)
    torch.manual_seed(rank)
    model = nn.Linear(8, 8)
    wrapped: Any = fabric.setup(model)
    values = flat(model)
    everyone = [torch.empty_like(values) for _ in range(world)]
    torch.distributed.all_gather(everyone, values)
    with fabric.no_backward_sync(wrapped, enabled=False):
        fabric.backward(wrapped(torch.ones(1, 8)).sum())
    model.zero_grad()
    fabric.backward(wrapped(torch.full((1, 8), float(rank))).sum())
    gradients = flat(model, gradients=True)[:64]
    return max(float((x - values).abs().max()) for x in everyone), float((gradients - 1.5).abs().max())


def test_replicas_begin_alike_and_gradients_stay_averaged(run_ranks: RankPool) -> None:
    assert run_ranks(4, _unlike, init=False) == [(0.0, 0.0)] * 4


def _held(rank: int, world: int) -> tuple[int, int]:
    """Bytes of weights, gradients and optimizer state after a step: replicated, and sharded."""
    held = []
    for kind in (ContextParallelStrategy, ContextParallelFSDPStrategy):
        fabric = fabric_of(rank, world, kind(ring=world))
        model = wan().build().float()
        wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        fabric.backward(wrapped(**ARGUMENTS, return_dict=False)[0].square().mean())
        optimizer.step()
        tensors = [x for p in model.parameters() for x in (p.detach(), p.grad)]
        tensors += [x for state in optimizer.state.values() for x in state.values()]
        local = (x.to_local() if isinstance(x, DTensor) else x for x in tensors if x is not None)
        held.append(sum(x.numel() * x.element_size() for x in local))
    return held[0], held[1]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_rank_holds_its_share_of_weights_gradients_and_optimizer_state(run_ranks: RankPool, world: int) -> None:
    for replicated, sharded in run_ranks(world, _held, init=False):
        print(f"{world} ranks: {replicated} bytes replicated, {sharded} sharded")
        assert sharded < replicated / world * 1.1


def _given_mesh(rank: int, world: int) -> tuple[float, float, tuple[int, int]]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("ring", "ulysses", "fsdp"))
    found = _train(rank, world, {"mesh": mesh})
    strategy = ContextParallelFSDPStrategy(mesh=mesh)
    strategy.context.set_up()
    return found["gradient"], found["share"], (strategy.data_rank, strategy.data_size)


@pytest.mark.full
def test_weights_are_sharded_along_the_fsdp_axis_of_a_given_mesh(run_ranks: RankPool) -> None:
    results = run_ranks(4, _given_mesh)
    for gradient, share, _ in results:
        assert gradient < 1e-5
        assert 0.4 < share < 0.6
    assert [place for _, _, place in results] == [(0, 2), (1, 2), (0, 2), (1, 2)]


def _empty(rank: int, world: int, folder: str) -> tuple[bool, float, list[str]]:
    reference: Any = wan().build().float()
    path = Path(folder) / "weights.pt"
    if rank == 0:
        torch.save(reference.state_dict(), path)
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world))
    fabric.barrier()
    with fabric.init_module(empty_init=True):
        model: Any = type(reference).from_config(reference.config)
    nowhere = all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    model = fabric.setup(model)
    unset = [name for name, p in model.named_parameters() if whole(p.detach()).isnan().any()]
    fabric.load_raw(path, model)
    with torch.no_grad():
        out, expected = (x(**ARGUMENTS, return_dict=False)[0] for x in (model, reference))
    return nowhere, float((out - expected).abs().max()), unset


def test_a_model_made_without_storage_is_loaded_in_shards(run_ranks: RankPool, tmp_path: Path) -> None:
    for nowhere, error, unset in run_ranks(2, _empty, str(tmp_path), init=False):
        assert nowhere
        assert error < 1e-5
        assert any("scale_shift_table" in name for name in unset)  # loud if it is forgotten


def _lora(rank: int, world: int, precision: str) -> tuple[float, list[bool]]:
    from peft import LoraConfig

    def build() -> nn.Module:
        model = wan().build().float()
        model.requires_grad_(requires_grad=False)
        torch.manual_seed(3)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
        return model

    def gradients(model: nn.Module) -> Tensor:
        return torch.cat([whole(p.grad).flatten() for p in model.parameters() if p.requires_grad])

    warnings.simplefilter("ignore")
    reference = build()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        out = reference(**ARGUMENTS, return_dict=False)[0]
    out.float().square().mean().backward()
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world), precision=precision)
    model = build()
    wrapped, _ = fabric.setup(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    fabric.backward(wrapped(**ARGUMENTS, return_dict=False)[0].float().square().mean())
    expected = gradients(reference)
    error = float((gradients(model) - expected).norm() / expected.norm())
    return error, [p.grad is None for p in model.parameters() if not p.requires_grad]


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 0.05)])
@pytest.mark.default(1)
def test_lora_on_a_frozen_base_that_is_sharded(run_ranks: RankPool, precision: str, tolerance: float) -> None:
    for error, untouched in run_ranks(2, _lora, precision, init=False):
        assert error < tolerance
        assert all(untouched)


class _WithEncoder(nn.Module):
    """A transformer and a frozen encoder that is called by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.encoder = wan().build().float(), _Encoder()
        self.encoder.requires_grad_(requires_grad=False)

    def forward(self, **arguments: Tensor) -> Tensor:
        arguments["encoder_hidden_states"] = self.encoder.encode(arguments["encoder_hidden_states"])
        out: Tensor = self.transformer(**arguments, return_dict=False)[0]
        return out


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.linear(x, layer.weight, layer.bias)
        return x


def _frozen(rank: int, world: int) -> tuple[bool, bool]:
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ulysses=world))
    module = _WithEncoder()
    model = fabric.setup(module)
    fabric.backward(model(**ARGUMENTS).square().mean())
    return (
        any(isinstance(p, DTensor) for p in module.encoder.parameters()),
        all(isinstance(p, DTensor) for p in module.transformer.parameters()),
    )


def test_children_that_do_not_train_stay_whole(run_ranks: RankPool) -> None:
    assert run_ranks(2, _frozen, init=False) == [(False, True)] * 2


def _late(rank: int, world: int) -> str:
    said = []
    for kind in (torch.optim.AdamW, torch.optim.Adagrad):  # Adagrad begins when it is created
        fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world))
        model, alone = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        optimizer = kind(model.parameters())
        if kind is torch.optim.AdamW:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        with pytest.raises(
            ValueError, match=r"already has state for weights.* is created after fabric.setup_mod"
        ) as caught:
            fabric.setup(model, optimizer)
        said.append(str(caught.value))
    alone.load_state_dict({name: whole(x.detach()) for name, x in model.state_dict().items()})
    wrapped = fabric.setup_module(model)
    optimizers = [fabric.setup_optimizers(kind(model.parameters())), kind(alone.parameters())]
    fabric.backward(wrapped(torch.ones(1, 2)).sum())
    alone(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(flat(model), flat(alone))
    return said[0]


def test_an_optimizer_that_has_begun_with_whole_weights_is_refused(run_ranks: RankPool) -> None:
    assert all("AdamW" in message for message in run_ranks(2, _late, init=False))


@pytest.mark.parametrize(
    ("settings", "names"),
    [({"replicate": 0}, "replicate=0"), ({"rings": 2}, "no setting 'rings'"), ({"bucket_cap_mb": 1}, "bucket_cap_mb")],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], names: str) -> None:
    for kind in (ContextParallelFSDPStrategy, TrainersStrategy):
        with pytest.raises((ValueError, TypeError), match=names):
            kind(**settings)


class _Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 6), nn.Linear(6, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(x))
        return out


def _tied(rank: int, world: int) -> tuple[int, float]:
    reference = _Tied()
    state = {name: x.clone() for name, x in reference.state_dict().items()}
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world))
    with fabric.init_module(empty_init=True):
        model = _Tied()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    fabric.load_raw(_saved(state), wrapped)
    for module, trained in ((wrapped, optimizer), (reference, torch.optim.SGD(reference.parameters(), lr=0.5))):
        fabric.backward(module(torch.arange(4)).square().sum())
        trained.step()
    return len(list(model.parameters())), float((flat(model) - flat(reference)).abs().max())


def _saved(state: dict[str, Tensor]) -> Path:
    path = Path(tempfile.mkdtemp()) / "weights.pt"
    torch.save(state, path)
    return path


def test_tied_weights_stay_tied_without_storage(run_ranks: RankPool) -> None:
    torch.manual_seed(0)
    for count, error in run_ranks(2, _tied, init=False):
        assert count == 1
        assert error < 1e-6


def _mixed_dtypes(rank: int, world: int) -> str:
    model = wan().build().to(torch.bfloat16)
    model.blocks[0].norm2.float()
    with pytest.raises(ValueError, match="cannot shard together") as caught:
        fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world)).setup(model)
    return str(caught.value)


def test_weights_of_several_types_are_refused_by_name(run_ranks: RankPool) -> None:
    for said in run_ranks(2, _mixed_dtypes, init=False):
        assert "bfloat16" in said
        assert "norm2.weight in float32" in said


def _no_average(rank: int, world: int) -> str:
    trainer = trainer_of(rank, world, TrainersStrategy(ring=world), max_steps=1, callbacks=[EMAWeightAveraging()])
    with pytest.raises(ValueError, match=r"use EMACallback\(decay=") as caught:
        trainer.fit(TrainsWan(), DataLoader(Clips(2)))
    return str(caught.value)


def test_averages_that_would_fail_later_are_refused_at_once(run_ranks: RankPool) -> None:
    assert all("EMAWeightAveraging" in said for said in run_ranks(2, _no_average, init=False))
