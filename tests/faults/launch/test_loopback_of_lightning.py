"""Ranks that Lightning's launchers start on this machine listen on the loopback interface only, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recipe import ROOT
from tests.harness import warm

LOOPBACK = {"127.0.0.1", "::1"}
SCRIPT = Path(__file__).with_name("lightning_ranks_script.py")
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_RANK", "STANDALONE_PORT")

pytestmark = pytest.mark.skipif(not Path("/proc/self/net/tcp").is_file(), reason="needs /proc/net/tcp of Linux")


def ran(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a clean environment."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return warm.run(
        [sys.executable, str(SCRIPT), *arguments, str(folder)],
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        timeout=150,
    )


def found(folder: Path, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """Return the results of all ranks."""
    done = ran(folder, *arguments, **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read(folder, int(arguments[-1]))


def read(folder: Path, ranks: int, name: str = "") -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in range(ranks)]


def check(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert one["listens"], "gloo listens"
        assert set(one["listens"]) <= LOOPBACK, one
        assert one["met"] == list(range(len(ranks)))
        assert one["variables"] == ["lo", "=lo", None]


@pytest.mark.parametrize(
    ("flavour", "kind", "method", "ranks"),
    [("fabric", "cp", "fork", 3), ("fabric", "cp_fsdp", "popen", 3), ("trainer", "cp_fsdp", "spawn", 2)],
)
@pytest.mark.default(1)
def test_ranks_of_lightnings_launchers_listen_on_the_loopback_interface_only(
    flavour: str, kind: str, method: str, ranks: int, tmp_path: Path
) -> None:
    check(found(tmp_path, flavour, kind, method, str(ranks)))
    if (tmp_path / "parent.json").is_file():
        assert json.loads((tmp_path / "parent.json").read_text()) == [], "the process that started them has closed it"


@pytest.mark.full
def test_ranks_of_a_session_listen_on_the_loopback_interface_only(tmp_path: Path) -> None:
    check(found(tmp_path, "session", "cp", "fork", "2"))
    check(read(tmp_path, 2, "again_"))
    for name in ("first_", "second_"):
        check(read(tmp_path, 1, name))
