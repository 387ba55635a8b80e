"""Launch from scripts, and from sessions that Lightning detects as interactive."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities import imports
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cp import fabric, pytorch
from lightning_cp.strategies.launchers import choose_start_method, ready_to_launch

ALL = [
    fabric.ContextParallelStrategy,
    fabric.ContextParallelFSDPStrategy,
    pytorch.ContextParallelStrategy,
    pytorch.ContextParallelFSDPStrategy,
]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning finds out when it is imported."""
    monkeypatch.setattr(imports, "_IS_INTERACTIVE", True)


def _connected(kind: Any, count: int, **settings: Any) -> Any:
    strategy = kind(**settings)
    strategy.accelerator = CPUAccelerator() if "fabric" in kind.__module__ else mock.Mock()
    strategy.parallel_devices = [torch.device("cpu")] * count
    strategy.cluster_environment = LightningEnvironment()
    strategy._configure_launcher()
    return strategy


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.usefixtures("session")
def test_an_interactive_session_forks_and_keeps_a_single_rank(kind: Any) -> None:
    launcher = _connected(kind, 2, ring=2).launcher
    assert isinstance(launcher, kind._process_launcher)
    assert launcher.is_interactive_compatible
    assert _connected(kind, 2, ring=2, start_method="fork").launcher.is_interactive_compatible
    assert _connected(kind, 1).launcher is None
    with pytest.raises(
        ValueError, match=r"start_method='popen' cannot start 2 ranks from a notebook.*run your code as"
    ):
        _connected(kind, 2, ring=2, start_method="popen")


@pytest.mark.parametrize("kind", ALL)
def test_scripts_are_started_again_unless_another_method_is_chosen(kind: Any) -> None:
    assert "Script" in type(_connected(kind, 2, ring=2).launcher).__name__
    for method in ("spawn", "fork", "forkserver"):
        launcher = _connected(kind, 2, ring=2, start_method=method).launcher
        assert isinstance(launcher, kind._process_launcher)
        assert launcher._start_method == method
    with pytest.raises(ValueError, match="start_method='thread' must be one of popen, spawn, fork, forkserver"):
        kind(start_method="thread")


@pytest.mark.usefixtures("session")
def test_external_launchers_are_unchanged_and_platforms_without_fork_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_start_method("fork", ranks=2, external=True) == "popen"
    monkeypatch.setattr("torch.multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ValueError, match="only fork can, on Linux and macOS"):
        choose_start_method(None, ranks=2, external=False)


def test_cuda_before_a_fork_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with ready_to_launch("spawn", LightningEnvironment()):
        pass
    with (
        pytest.raises(RuntimeError, match=r"start_method='fork' .*used CUDA.*Restart the kernel.*as a script"),
        ready_to_launch("fork", LightningEnvironment()),
    ):
        pass


def test_gpus_that_a_fork_would_lose_are_an_error_before_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: False)  # this process may have asked for GPUs
    with ready_to_launch("fork", LightningEnvironment(), on_gpus=True):
        pass
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)  # as in each process that is forked from here
    with ready_to_launch("fork", LightningEnvironment(), on_gpus=False):
        pass
    with (
        pytest.raises(RuntimeError, match=r"cannot start ranks that use GPUs.*import lightning first"),
        ready_to_launch("fork", LightningEnvironment(), on_gpus=True),
    ):
        pass


@pytest.mark.parametrize("given", [None, "4321"])
def test_each_launch_uses_a_new_port(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("MASTER_PORT", None)
    if given:
        os.environ["MASTER_PORT"] = given
    environment, ports = LightningEnvironment(), []
    for _ in range(2):
        with ready_to_launch("fork", environment):
            ports.append(environment.main_port)
            os.environ["MASTER_PORT"] = str(environment.main_port)  # as Lightning does
        assert os.environ.get("MASTER_PORT") == given
    assert (ports == [4321, 4321]) if given else ports[0] != ports[1]


@pytest.mark.parametrize("size", [1, 2])
def test_the_group_of_a_single_rank_is_left_before_a_launch(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "MASTER_PORT": "4321"})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        if size == 1:
            with ready_to_launch("fork", LightningEnvironment()):
                assert not dist.is_initialized()
                assert "MASTER_PORT" not in os.environ
        else:
            with (
                pytest.raises(RuntimeError, match="this process is already rank 0 of 2"),
                ready_to_launch("fork", LightningEnvironment()),
            ):
                pass
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
