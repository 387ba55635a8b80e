"""Lightning's tests of strategies, applied to ours on several ranks: save, load, clip, initialise, compile."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_cp.engine.apply import installed_on
from tests.dist.lightning_ranks import BY_PLAN, STRATEGIES, distance, fabric_of, flat, train, trainer_of, whole
from tests.dist.module import inputs
from tests.dist.plain import Plain
from tests.harness import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")
REPLICATED, SHARDED = (STRATEGIES["fabric", kind] for kind in ("cp", "cp_fsdp"))


def _model(seed: int) -> Plain:
    torch.manual_seed(seed)
    return Plain()


def _gradients(model: nn.Module) -> Tensor:
    model(inputs())[0].square().mean().backward()
    return flat(model, gradients=True)


# Saving and loading


def _saved(rank: int, world: int, folder: str) -> tuple[list[str], list[str]]:
    here = Path(folder)
    ours = fabric_of(rank, world, REPLICATED(ring=world, **BY_PLAN))
    model = _model(1)
    values = flat(model)
    ours.save(here / "before", {"model": model})
    wrapped, optimizer = ours.setup(model, torch.optim.AdamW(model.parameters()))
    ours.save(here / "after", {"model": wrapped, "optimizer": optimizer, "steps": 3})
    for name in ("before", "after"):
        for set_up in (False, True):
            other = _model(2)
            ours.load(here / name, {"model": ours.setup(other) if set_up else other}, strict=False)
            assert torch.equal(flat(other), values), f"{name} setup, loaded {'after' if set_up else 'before'} it"

    state: dict[str, Any] = {"model": wrapped, "coconut": 11}
    with pytest.raises(KeyError, match="coconut"):
        ours.load(here / "after", state)
    assert set(ours.load(here / "after", state, strict=False)) == {"optimizer", "steps"}
    assert state["coconut"] == 11
    ours.save(here / "biases", {"model": wrapped}, filter={"model": lambda name, _: "bias" in name})
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        ours.load(here / "biases", {"model": wrapped})
    ours.load(here / "biases", {"model": wrapped}, strict=False)
    return list(torch.load(here / "after")["model"]), list(torch.load(here / "biases")["model"])


def test_weights_are_saved_before_and_after_setup_under_the_same_names(run_ranks: RankPool, tmp_path: Path) -> None:
    names = list(Plain().state_dict())
    for after, filtered in run_ranks(3, _saved, str(tmp_path), init=False):
        assert after == names
        assert filtered == [name for name in names if name.endswith("bias")]


def _sharded(rank: int, world: int, **settings: Any) -> tuple[Any, nn.Module, Any, nn.Module]:
    """Fabric, a model after one step, its optimizer, and the model beneath."""
    ours = fabric_of(rank, world, SHARDED(ring=world, **BY_PLAN, **settings))
    model = _model(1)
    wrapped, optimizer = ours.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    ours.backward(wrapped(inputs())[0].square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return ours, wrapped, optimizer, model


def _moments(optimizer: Any) -> Tensor:
    return torch.cat([whole(state["exp_avg"]).flatten() for state in optimizer.state.values()])


def _saved_shards(rank: int, world: int, folder: str, distributed: bool) -> bool:
    path = Path(folder) / "checkpoint"
    ours, wrapped, optimizer, model = _sharded(rank, world, save_distributed_checkpoint=distributed)
    state: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "steps": 1}
    ours.save(path, state)
    values, moments = flat(model), _moments(optimizer)
    for _ in range(2):
        ours.backward(wrapped(inputs())[0].square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(flat(model), values)
    state["steps"] = 0
    assert not ours.load(path if rank == 0 else Path("nowhere"), state)  # the first rank says from where
    assert state["steps"] == 1
    assert torch.equal(flat(model), values)
    assert torch.equal(_moments(optimizer), moments)

    with pytest.raises(KeyError, match="coconut"):
        ours.load(path, {"model": wrapped, "coconut": 11})
    ours.load(path, {"model": wrapped, "coconut": 11}, strict=False)
    biases = {"model": lambda name, _: "bias" in name}
    if not distributed:
        ours.save(Path(folder) / "biases", {"model": wrapped}, filter=biases)
        ours.barrier()
        names = list(torch.load(Path(folder) / "biases")["model"])
        assert names == [name for name in Plain().state_dict() if name.endswith("bias")]
        with pytest.raises(KeyError, match="does not exist in the loaded checkpoint"):
            ours.load(Path(folder) / "biases", {"model": wrapped})
        ours.load(Path(folder) / "biases", {"model": wrapped}, strict=False)
    is_folder = path.is_dir()
    ours.strategy._save_distributed_checkpoint = not distributed
    ours.save(path, state)
    ours.load(path, state)
    assert torch.equal(flat(model), values)
    assert path.is_dir() != is_folder, "what had the name goes, also where it was of the other kind"
    return is_folder


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.default(1)
def test_shards_are_saved_and_loaded_strictly_or_not(run_ranks: RankPool, tmp_path: Path, distributed: bool) -> None:
    assert run_ranks(3, _saved_shards, str(tmp_path), distributed, init=False) == [distributed] * 3


class _Trained(LightningModule):
    """A plain model on random tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _model(1)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(batch)[0].square().mean()
        return loss

    def test_step(self, batch: Tensor) -> None:
        self.log("loss", self.model(batch)[0].square().mean(), batch_size=len(batch))

    def predict_step(self, batch: Tensor) -> Tensor:
        out: Tensor = self.model(batch)[0]
        return out

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _stages(rank: int, world: int, folder: str, kind: str) -> list[float]:
    """Losses of tests: after a fit, of a checkpoint without optimizers, and of one with after other weights."""
    module, loader = _Trained(), DataLoader(inputs(), batch_size=2)  # type: ignore[arg-type]
    strategy = STRATEGIES["trainer", kind](ring=world, **BY_PLAN)
    trainer = train(rank, world, strategy, module, loader, steps=1)
    trainer.save_checkpoint(Path(folder) / "all")
    trainer.save_checkpoint(Path(folder) / "weights", weights_only=True)
    with torch.inference_mode():
        losses = [trainer.test(module, loader, verbose=False)[0]["loss"]]
        for name in ("weights", "all"):
            for parameter in module.parameters():
                parameter.zero_()
            losses.append(trainer.test(module, loader, ckpt_path=Path(folder) / name, verbose=False)[0]["loss"])
        assert len(trainer.predict(module, loader) or []) == 1
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module, loader, ckpt_path=Path(folder) / "all")
    assert trainer.global_step == 2
    return losses


@pytest.mark.parametrize("kind", ["cp", "cp_fsdp"])
@pytest.mark.default(1)
def test_one_trainer_goes_through_all_stages_with_checkpoints_that_have_optimizers_or_not(
    run_ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    for first, *others in run_ranks(2, _stages, str(tmp_path), kind, init=False):
        assert first > 0.01
        assert others == [first, first]


# Making modules


def _kept(x: Tensor) -> tuple[str, str, bool]:
    return x.device.type, str(x.dtype).removeprefix("torch."), isinstance(x, DTensor)


def _made(rank: int, world: int, flavour: str, kind: str, precision: str, empty: bool) -> list[Any]:
    """Device, dtype and whether in shards, when a module is made and when it is set up; whether it is parallel."""
    strategy = STRATEGIES[flavour, kind](ring=world, **BY_PLAN)
    runner: Any = (fabric_of if flavour == "fabric" else trainer_of)(rank, world, strategy, precision=precision)
    with runner.init_module(empty_init=empty):
        module: Any = _Trained()
    made = _kept(module.model.proj_out.weight)
    if flavour == "fabric":
        runner.setup(module.model)
    else:
        runner.fit_loop.epoch_loop.max_steps = 1
        runner.fit(module, DataLoader(inputs(), batch_size=1))
    return [made, _kept(module.model.proj_out.weight), installed_on(module.model) is not None]


@pytest.mark.parametrize(
    ("flavour", "kind", "dtype", "empty"),
    [
        ("fabric", "cp_fsdp", "bfloat16", True),
        ("trainer", "cp_fsdp", "float32", True),
        ("fabric", "cp", "float32", True),
    ],
)
@pytest.mark.default(1)
def test_modules_are_made_in_the_dtype_and_without_storage_where_they_will_be_sharded(
    run_ranks: RankPool, flavour: str, kind: str, dtype: str, empty: bool
) -> None:
    sharded, precision = kind == "cp_fsdp", {"float32": "32-true", "bfloat16": "bf16-true"}[dtype]
    made = ("meta" if sharded and empty else "cpu", dtype, False)
    found = run_ranks(2, _made, flavour, kind, precision, empty, init=False)
    assert found == [[made, ("cpu", dtype, sharded), True]] * 2


# Compiling


def _compiled(rank: int, world: int, kind: Any, outside: bool) -> tuple[float, list[str]]:
    expected = _gradients(_model(1))
    ours = fabric_of(rank, world, kind(ring=world, **BY_PLAN))
    model = _model(1)
    wrapped = ours.setup(torch.compile(model, backend="eager"), _reapply_compile=outside)
    ours.backward(wrapped(inputs())[0].square().mean())
    layers, inner = [], wrapped._forward_module
    while inner is not model:
        layers.append(type(inner).__name__)
        inner = inner._orig_mod if isinstance(inner, OptimizedModule) else inner.module
    assert isinstance(model, FSDPModule) == (kind is SHARDED)
    return distance(flat(model, gradients=True), expected), layers


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "outside", "layers"),
    [
        (REPLICATED, True, [OptimizedModule.__name__, DistributedDataParallel.__name__]),
        (REPLICATED, False, [DistributedDataParallel.__name__, OptimizedModule.__name__]),
        (SHARDED, True, [OptimizedModule.__name__]),
    ],
)
def test_a_compiled_module_is_compiled_again_after_set_up(
    run_ranks: RankPool, kind: Any, outside: bool, layers: list[str]
) -> None:
    for error, found in run_ranks(3, _compiled, kind, outside, init=False, timeout_s=120):
        assert error < 1e-5
        assert found == layers


# Modules that shard themselves


def _by_hand(rank: int, world: int) -> float:
    """By a function, with an optimizer that was made before."""

    def shard(module: nn.Module, mesh: Any) -> nn.Module:
        for part in (*module.blocks, module):  # type: ignore[misc]
            fully_shard(part, mesh=mesh["data_parallel"])
        return module

    reference = _model(1)
    expected = flat(reference) - 0.1 * _gradients(reference)
    ours = fabric_of(rank, world, SHARDED(ring=world, **BY_PLAN, parallelize_fn=shard))
    model = _model(1)
    wrapped, optimizer = ours.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ours.backward(wrapped(inputs())[0].square().mean())
    optimizer.step()

    half = fabric_of(rank, world, SHARDED(parallelize_fn=lambda module, mesh: fully_shard(module[0], mesh=mesh)))
    with pytest.raises(ValueError, match=r"1\.weight is sharded over 1 of 3 ranks"):
        half.setup(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    return distance(flat(model), expected)


def test_a_function_may_shard_all_that_trains_and_not_less(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _by_hand, init=False)) < 1e-5


class _ShardsItself(_Trained):
    def __init__(self, *, all_of_it: bool) -> None:
        super().__init__()
        self.parts = [*self.model.blocks, self.model] if all_of_it else [self.model.blocks[0]]

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for part in self.parts:
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


def _configured(rank: int, world: int) -> tuple[bool, Tensor]:
    loader: Any = DataLoader(inputs(), batch_size=2)  # type: ignore[arg-type]
    first, second = (
        trainer_of(rank, world, STRATEGIES["trainer", "cp_fsdp"](ring=world, **BY_PLAN), max_steps=1) for _ in range(2)
    )
    with first.init_module(empty_init=True):
        empty = _ShardsItself(all_of_it=True)
    first.fit(empty, loader)
    module = _ShardsItself(all_of_it=True)
    second.fit(module, loader)
    with pytest.raises(ValueError, match=r"sharded over 1 of 3 ranks by _ShardsItself itself"):
        second.fit(_ShardsItself(all_of_it=False), loader)
    return any(p.is_meta for p in empty.parameters()), flat(module.model)


def test_configure_model_may_shard_all_that_trains_and_not_less(run_ranks: RankPool) -> None:
    reference = _model(1)
    expected = flat(reference) - 0.1 * _gradients(reference)
    for is_meta, found in run_ranks(3, _configured, init=False):
        assert not is_meta
        assert distance(found, expected) < 1e-5


# What is left


def _left(rank: int, world: int, kind: str) -> tuple[set[str], list[str]]:
    """Return environment variables and threads that exist after the Trainer, but not before."""
    strategy = STRATEGIES["trainer", kind](ring=world, **BY_PLAN)
    trainer = trainer_of(rank, world, strategy, max_steps=1)
    environment, threads = dict(os.environ), set(threading.enumerate())
    trainer.fit(_Trained(), DataLoader(inputs(), batch_size=1))  # type: ignore[arg-type]
    deadline = time.monotonic() + 60
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    changed = {key for key, value in os.environ.items() if environment.get(key) != value}
    return changed | (environment.keys() - os.environ.keys()), [thread.name for thread in left]


@pytest.mark.parametrize("kind", ["cp", "cp_fsdp"])
@pytest.mark.default(1)
def test_the_trainer_leaves_no_thread_and_the_environment_as_it_was(run_ranks: RankPool, kind: str) -> None:
    for changed, threads in run_ranks(2, _left, kind, init=False):
        assert changed <= {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"}  # Lightning's own
        assert not threads
