"""When ranks use our listening socket for the rendezvous, and when they use Lightning's."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_cp.launch.rendezvous import LISTENER
from lightning_cp.strategies.launchers import LocalRanks


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRanks]:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("MASTER_ADDR", "MASTER_PORT", "STANDALONE_PORT", "LOCAL_RANK", LISTENER):
        os.environ.pop(name, None)
    found = LocalRanks()
    yield found
    found.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("name", [None, "MASTER_PORT", "STANDALONE_PORT"])
def test_the_port_is_held_from_its_choice_on(ranks: LocalRanks, name: str | None) -> None:
    environment = LightningEnvironment()
    if name:
        os.environ[name] = str(_free_port())
    with ranks.for_scripts(environment, num_nodes=1):
        assert os.environ[LISTENER] == "-1", "the scripts know that rank 0 listens"
        port = environment.main_port
        assert name is None or port == int(os.environ[name])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
    assert LISTENER not in os.environ
    socket.create_connection(("127.0.0.1", port), timeout=5).close()


@pytest.mark.parametrize("given", ["http", "70000", "taken"])
def test_a_port_that_cannot_be_used_is_an_error_before_ranks_start(ranks: LocalRanks, given: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1]) if given == "taken" else given
        with (
            pytest.raises(ValueError, match=rf"MASTER_PORT={os.environ['MASTER_PORT']}: .* from 1 to 65535"),
            ranks.for_processes(LightningEnvironment(), num_nodes=1),
        ):
            raise AssertionError("ranks would have been started")


class _ClusterOfUser(LightningEnvironment):
    pass


@pytest.mark.parametrize("case", ["nodes", "torchrun", "subclass", "started by hand", "address"])
def test_ranks_that_are_not_all_started_here_meet_as_lightning_arranges(ranks: LocalRanks, case: str) -> None:
    environment = {"torchrun": TorchElasticEnvironment, "subclass": _ClusterOfUser}.get(case, LightningEnvironment)()
    if case == "started by hand":
        os.environ["LOCAL_RANK"] = "0"
    if case == "address":
        os.environ["MASTER_ADDR"] = "192.0.2.1"
    before = dict(os.environ)
    with ranks.for_scripts(environment, num_nodes=2 if case == "nodes" else 1):
        assert os.environ == before
    ranks.join(SimpleNamespace(cluster_environment=environment, num_nodes=2 if case == "nodes" else 1))
    assert os.environ == before


def test_the_socket_closes_where_ranks_could_not_be_started(ranks: LocalRanks) -> None:
    environment = LightningEnvironment()
    with pytest.raises(RuntimeError, match="no process"), ranks.for_scripts(environment, num_nodes=1):
        raise RuntimeError("no process")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", environment.main_port), timeout=5)
    assert isinstance(pickle.loads(pickle.dumps(ranks)), LocalRanks)
