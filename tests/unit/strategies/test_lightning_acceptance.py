"""Lightning's own tests of strategies, on ours, without ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.precision import HalfPrecision
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cp import fabric, pytorch
from lightning_cp.strategies.context import ContextParallel
from tests.dist.plain import PLAIN_PLAN, Plain

SHARDED = [fabric.ContextParallelFSDPStrategy, pytorch.ContextParallelFSDPStrategy]
ALL = [fabric.ContextParallelStrategy, pytorch.ContextParallelStrategy, *SHARDED]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _first_rank() -> Iterator[None]:
    """Restore the rank, which Lightning keeps on a function."""
    rank = getattr(rank_zero_only, "rank", None)
    yield
    rank_zero_only.rank = rank
    if dist.is_initialized():
        dist.destroy_process_group()


def _named(kinds: list[Any]) -> Any:
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: f"{kind.__module__.split('.')[-1]} {kind.__name__}")


def _on_cpus(kind: Any, count: int, **settings: Any) -> Any:
    """A strategy as Fabric or the Trainer connects it, before launch."""
    strategy = kind(**settings)
    strategy.accelerator = CPUAccelerator() if "fabric" in kind.__module__ else mock.Mock()
    strategy.parallel_devices = [CPU] * count
    strategy.cluster_environment = LightningEnvironment()
    strategy._lightning_module = mock.Mock()
    return strategy


# Before the ranks are up


@_named(SHARDED)
@pytest.mark.parametrize("mesh", ["weights_mesh", "device_mesh"])
def test_meshes_cannot_be_had_before_the_ranks_are_up(kind: Any, mesh: str) -> None:
    strategy = kind(ring=2)
    with pytest.raises(RuntimeError, match="before processes have initialized is not allowed"):
        getattr(strategy, mesh)


@_named(ALL)
def test_places_in_a_group_cannot_be_had_before_the_ranks_are_up(kind: Any) -> None:
    with pytest.raises(RuntimeError, match="the process groups are not initialized yet"):
        kind(ring=2).context_rank


@mock.patch("lightning.fabric.strategies.ddp.DistributedDataParallel")
def test_only_a_module_with_a_transformer_needs_the_ranks(ddp: mock.Mock) -> None:
    module = nn.Linear(1, 1)
    strategy = _on_cpus(fabric.ContextParallelStrategy, 2, ring=2, bucket_cap_mb=7)
    with mock.patch.object(strategy, "watch_trained"):  # it looks into a real wrapper
        assert strategy.setup_module(module) is ddp.return_value
    ddp.assert_called_once_with(module=module, device_ids=None, bucket_cap_mb=7)
    with pytest.raises(RuntimeError, match="the process groups are not initialized yet"):
        _on_cpus(fabric.ContextParallelStrategy, 2, ring=2, plans={Plain: PLAIN_PLAN}).setup_module(Plain())


# Joining


@_named(ALL)
@pytest.mark.parametrize("degrees", [{}, {"ring": 2}])
def test_the_process_group_gets_backend_and_timeout_and_meshes_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch, kind: Any, degrees: dict[str, int]
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")  # some of them are set by Lightning
    strategy = _on_cpus(kind, 2, timeout=timedelta(seconds=30), process_group_backend="gloo", **degrees)
    with (
        mock.patch("torch.distributed.init_process_group") as init,
        mock.patch("lightning.fabric.strategies.model_parallel._setup_device_mesh"),
        mock.patch("lightning.pytorch.strategies.model_parallel._setup_device_mesh"),
        mock.patch.object(ContextParallel, "set_up") as set_up,
    ):
        strategy.setup_environment()
    init.assert_called_once_with("gloo", rank=0, world_size=2, timeout=timedelta(seconds=30), device_id=None)
    set_up.assert_called_once_with()


@_named(SHARDED)
@pytest.mark.parametrize(("nodes", "devices", "size"), [(1, 4, 1), (1, 4, 8), (2, 4, 4)])
def test_a_data_parallel_size_that_is_not_the_world_is_refused(kind: Any, nodes: int, devices: int, size: int) -> None:
    strategy = _on_cpus(kind, devices, data_parallel_size=size)
    strategy.num_nodes = nodes
    strategy.cluster_environment = mock.Mock(world_size=lambda: nodes * devices, local_rank=lambda: 0)
    with mock.patch.object(kind, "_setup_distributed"), pytest.raises(RuntimeError, match=f"data_parallel_size={size}"):
        strategy.setup_environment()


@_named(SHARDED)
def test_tensor_parallelism_is_refused(kind: Any) -> None:
    assert kind(tensor_parallel_size="auto", data_parallel_size="auto")
    with pytest.raises(ValueError, match="tensor_parallel_size=2"):
        kind(tensor_parallel_size=2)


@_named(SHARDED)
def test_plugins_are_taken_as_every_other_strategy_takes_them(kind: Any) -> None:
    plugins = {
        "parallel_devices": [CPU, CPU],
        "cluster_environment": LightningEnvironment(),
        "accelerator": mock.Mock(),
    }
    strategy = kind(**plugins)
    assert {name: getattr(strategy, name) for name in plugins} == plugins
    name, other = ("precision", "precision_plugin")[:: 1 if "fabric" in kind.__module__ else -1]
    half = HalfPrecision("bf16-true")
    assert getattr(kind(**{name: half}), name) is half
    with pytest.raises(TypeError, match=f"no setting '{other}'"):
        kind(**{other: half})


def test_fabrics_sharded_checkpoints_take_no_checkpoint_io() -> None:
    with pytest.raises(NotImplementedError, match="does not support setting a `CheckpointIO`"):
        fabric.ContextParallelFSDPStrategy(checkpoint_io=mock.Mock())


@_named(ALL)
def test_processes_that_others_started_are_not_started_again(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else Lightning sets it
    strategy = _on_cpus(kind, 2, ring=2)
    strategy.cluster_environment = mock.Mock(creates_processes_externally=True)
    strategy._configure_launcher()
    if kind in SHARDED:
        assert strategy.launcher is None
    else:
        assert strategy.launcher is not None
        strategy.launcher._call_children_scripts = mock.Mock()
        assert strategy.launcher.launch(lambda: "here") == "here"
        strategy.launcher._call_children_scripts.assert_not_called()


# Modules


def test_gradients_of_a_module_that_was_not_set_up_cannot_be_held_back() -> None:
    control = fabric.ContextParallelStrategy()._backward_sync_control
    assert control is not None
    with pytest.raises(TypeError, match="is wrapped in"), control.no_backward_sync(nn.Linear(2, 2), enabled=True):
        pass


class _Holder(LightningModule):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def _set_up(strategy: Any, module: nn.Module) -> nn.Module:
    """Set up as Fabric or the Trainer does, in one process without a group."""
    if isinstance(strategy, fabric.ContextParallelFSDPStrategy):
        strategy._device_mesh = mock.Mock()
        module = strategy.setup_module(module)
    else:
        strategy._lightning_module = strategy.model = _Holder(module)
        strategy.setup(mock.Mock())
    return module


@_named(SHARDED)
def test_modules_in_the_older_fsdp_are_refused(kind: Any) -> None:
    module = nn.Linear(2, 2)
    with (
        mock.patch.object(nn.Module, "modules", return_value=[mock.Mock(spec=FullyShardedDataParallel)]),
        pytest.raises(TypeError, match="only supports the new FSDP2 APIs"),
    ):
        _set_up(_on_cpus(kind, 1), module)


class _Scale(nn.Module):
    """A weight and no way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


class _Positions(nn.Module):
    """A buffer, filled anew from above its children."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(_Scale(), nn.Linear(4, 4))
        self.register_buffer("positions", torch.rand(2))

    def reset_parameters(self) -> None:
        assert isinstance(self.positions, torch.Tensor)
        self.positions.fill_(3.0)


@_named(SHARDED)
def test_what_has_no_storage_gets_it_and_what_cannot_be_initialised_is_named(kind: Any) -> None:
    with torch.device("meta"):
        module = _Positions()
    with pytest.warns(UserWarning, match=r"`reset_parameters\(\)` method for re-initialization: _Scale\. .* NaN"):
        _set_up(_on_cpus(kind, 1), module)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    assert {name for name, x in tensors.items() if x.isnan().any()} == {"layers.0.weight"}
    assert {x.device for x in tensors.values()} == {CPU}
    assert module.positions.tolist() == [3.0, 3.0]  # type: ignore[union-attr, operator]


def test_a_function_may_shard_in_the_place_of_the_strategy() -> None:
    module, sharded = nn.Linear(2, 2), nn.Linear(2, 2)
    function = mock.Mock(return_value=sharded)
    strategy = _on_cpus(fabric.ContextParallelFSDPStrategy, 1, parallelize_fn=function)
    assert _set_up(strategy, module) is sharded
    function.assert_called_once_with(module, strategy.device_mesh)
    function.return_value = None
    with pytest.raises(TypeError, match=r"must return a `nn\.Module`"):
        _set_up(strategy, module)


# Checkpoints


@_named(SHARDED)
def test_storage_options_are_refused(kind: Any, tmp_path: Path) -> None:
    arguments = [tmp_path, {}] if "fabric" in kind.__module__ else [{}, tmp_path]
    with pytest.raises(TypeError, match=r"ContextParallelFSDPStrategy\.save_checkpoint.* is not supported"):
        kind().save_checkpoint(*arguments, storage_options=mock.Mock())


def test_sharded_checkpoints_need_one_model_that_was_set_up(tmp_path: Path) -> None:
    strategy = fabric.ContextParallelFSDPStrategy()
    module = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="Could not find a distributed model"):
        strategy.save_checkpoint(tmp_path, {"model": module})
    with pytest.raises(ValueError, match="Could not find a distributed model"):
        strategy.load_checkpoint(tmp_path, {"model": module})
    with pytest.raises(ValueError, match=r"ContextParallelFSDPStrategy\.load_checkpoint\(\.\.\., state=None\)"):
        strategy.load_checkpoint(tmp_path, None)
    with pytest.raises(NotImplementedError, match="single optimizer"):
        strategy.load_checkpoint(tmp_path, torch.optim.SGD(module.parameters()))
    with pytest.raises(NotImplementedError, match="filtered"):
        strategy.save_checkpoint(tmp_path, {"model": module}, filter={"model": lambda name, _: "bias" in name})


def test_a_folder_without_a_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    model = mock.Mock(spec=nn.Module)
    trainers: Any = pytorch.ContextParallelFSDPStrategy()
    trainers.model, trainers._lightning_module = model, mock.Mock(strict_loading=True)
    with (
        mock.patch("lightning.fabric.strategies.model_parallel._has_dtensor_modules", return_value=True),
        pytest.raises(ValueError, match="does not point to a valid checkpoint"),
    ):
        trainers.load_checkpoint(checkpoint_path=tmp_path)
    with pytest.raises(ValueError, match="must be a single file containing the full state dict"):
        fabric.ContextParallelFSDPStrategy().load_checkpoint(path=tmp_path, state=model)


def test_a_folder_of_something_else_is_not_overwritten_by_one_file(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    for kind in SHARDED:
        arguments: Any = [tmp_path, {}] if "fabric" in kind.__module__ else [{}, tmp_path]
        with pytest.raises(IsADirectoryError, match="exists and is a directory"):
            kind(save_distributed_checkpoint=False).save_checkpoint(*arguments)
    assert (tmp_path / "thesis.tex").exists()


# A mesh of the user, in a world that is only pretended


def _environment(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> DeviceMesh:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # Lightning and torch write to it
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    return init_device_mesh("cpu", (2, 1, 4), mesh_dim_names=("ring", "ulysses", "fsdp"))


@_named(SHARDED)
@pytest.mark.parametrize("rank", [0, 6])
def test_a_mesh_of_ring_ulysses_and_fsdp_places_every_rank(
    monkeypatch: pytest.MonkeyPatch, kind: Any, rank: int
) -> None:
    mesh = _environment(monkeypatch, rank, 8)
    strategy = _on_cpus(kind, 8, mesh=mesh, stall_s=None)
    monkeypatch.setattr(strategy, "_share_random_state", lambda: None)  # a pretended group sends nothing
    strategy._configure_launcher()
    strategy.setup_environment()
    ring, column = divmod(rank, 4)
    assert (strategy.context_rank, strategy.context_size) == (ring, 2)
    assert (strategy.data_rank, strategy.data_size) == (column, 4)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": column}
    groups = strategy.context.groups
    assert dist.get_process_group_ranks(groups.ring) == dist.get_process_group_ranks(groups.context)
    assert dist.get_process_group_ranks(groups.context) == [column, column + 4]
    assert groups.ulysses is None
    weights = strategy.weights_mesh
    assert weights.mesh_dim_names == ("replicate", "shard")
    assert weights.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert tuple(weights.get_coordinate()) == (ring, column)

    layer = nn.Linear(3, 8)
    whole = layer.weight.detach().clone()
    module = layer if kind is fabric.ContextParallelFSDPStrategy else _Holder(layer)
    strategy._shard_weights(module, [])
    assert isinstance(layer.weight, DTensor)
    assert torch.equal(layer.weight.to_local(), whole[2 * column : 2 * column + 2])
