"""A job on one machine listens on the loopback interface only, so that no other machine can join it."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.e2e.recipe import ROOT
from tests.harness import warm

TARGETS = Path(__file__).with_name("listening.py")
LOOPBACK = {"127.0.0.1", "::1"}

pytestmark = pytest.mark.skipif(not Path("/proc/self/net/tcp").is_file(), reason="needs /proc/net/tcp of Linux")


_LAUNCHES = """
import json, sys
from pathlib import Path
from lightning_cp.launch import Job, LocalLauncher
from tests.faults.launch.listening import listening

target, folder, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
result = LocalLauncher(limit_s=150).launch(Job(target, folder / "config.yaml", ranks, folder / "logs", threads=1))
print(json.dumps([result.failure and result.failure.describe(), listening("self")]))
"""


def launched(function: str, folder: Path, *, ranks: int, **settings: object) -> list[Any]:
    """Return the results of all ranks. The launcher must not listen anywhere else than on the loopback interface."""
    OmegaConf.save(OmegaConf.create({"folder": str(folder), **settings}), folder / "config.yaml")
    command = [sys.executable, "-c", _LAUNCHES, f"{TARGETS}:{function}", str(folder), str(ranks)]
    done = warm.run(command, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    failure, listens = json.loads(done.stdout.splitlines()[-1])
    assert failure is None, failure
    assert set(listens) <= LOOPBACK
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_all_ranks_listen_on_the_loopback_interface_only(tmp_path: Path) -> None:
    found = launched("write_listening", tmp_path, ranks=3)
    for rank, one in enumerate(found):
        assert set(one["first"]) | set(one["again"]) <= LOOPBACK, one
        assert one["first"], "gloo listens"
        assert one["met"] == [0, 1, 2]
        assert one["stores"] == (1 if rank == 0 else 0), "rank 0 has the store of the group"


def test_a_rank_may_meet_at_a_port_of_its_own_and_keeps_the_interface_that_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert launched("elsewhere", tmp_path, ranks=2, port=port) == [[port, "lo", "ib0"]] * 2
