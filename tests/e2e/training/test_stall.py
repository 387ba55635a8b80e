"""A stalled collective as a user sees it: under our launch, under torchrun, and with a node that is cut off."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.recipe import RECIPE, ROOT, SMALL, ranks_of, started

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
STRATEGY = ("strategy=cp", "ring=2", "strategy.stall_s=1", "progress=false")


@pytest.mark.full
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["ours", "torchrun"])
def test_the_warning_says_where_a_peer_outside_of_collectives_is(launcher: tuple[str, ...], tmp_path: Path) -> None:
    end = tmp_path / "end"
    nap = ("model._target_=tests.e2e.failing.NappingDenoiser", f"+model.until={end}", "max_steps=3")
    with started(*SMALL, *STRATEGY, *nap, folder=tmp_path / "run", launcher=launcher) as process:
        others = (
            "a rank without such a warning has not joined" if launcher else "rank 1 is in no collective (e2e/failing.py"
        )
        stderr = _read_until(process, others, 120)
        end.touch()
        stderr += process.communicate(timeout=120)[1]
    assert process.returncode == 0, stderr
    output = stderr[stderr.index("warning: a collective has not ended") :]
    assert re.search(r"rank 0 waits in [\w.]+, (blocks\.0[.\w]* of )?WanTransformer3DModel", output)
    if not launcher:
        assert re.search(r"rank 1 is in no collective \(e2e/failing\.py:\d+ in forward\)", output)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "victim"), [(3, 0), (2, 1)])
def test_a_stopped_rank_is_named_on_the_terminal(ranks: int, victim: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(*SMALL, *STRATEGY, f"ring={ranks}", "max_steps=100000", folder=folder) as process:
        metrics = folder / "metrics.csv"
        _wait(lambda: metrics.is_file() and metrics.read_text().count("\n") > 3, 120, [])
        stopped = ranks_of(process)[victim]
        stopped.send_signal(signal.SIGSTOP)
        try:
            output = _read_until(process, "is stopped: kill -CONT", 90)
        finally:
            stopped.send_signal(signal.SIGCONT)
        assert f"rank {victim} (process {stopped.pid}) is stopped" in output
        waiting = [rank for rank in range(ranks) if rank != victim]
        assert re.search(rf"ranks? .*[{''.join(map(str, waiting))}].* waits? in \w+", output), output
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM, output + stderr


def _read_until(process: subprocess.Popen[str], words: str, limit_s: float) -> str:
    """Output of a process to stderr up to the line with these words; it is killed if they do not come in time."""
    assert process.stderr is not None
    timer, lines = threading.Timer(limit_s, process.kill), []
    timer.start()
    try:
        for line in process.stderr:
            lines.append(line)
            if words in line:
                return "".join(lines)
    finally:
        timer.cancel()
        timer.join()
    raise AssertionError("".join(lines))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Two network namespaces that see each other, 10.77.0.1 and 10.77.0.2; their names are their interfaces' too."""
    names = tuple(f"lcp{os.getpid() % 10_000}{side}" for side in "ab")
    with ExitStack() as stack:
        try:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
            for i, name in enumerate(names):
                _ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", name)
                for device in ("lo", name):
                    _ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield names[0], names[1]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.mark.full  # it waits for silence on both nodes, and starts both ranks cold
def test_two_nodes_of_which_one_is_cut_off_both_tell_of_it(nodes: tuple[str, str], tmp_path: Path) -> None:
    settings = (*SMALL, *STRATEGY, "max_steps=100000", "num_nodes=2", f"hydra.run.dir={tmp_path / 'run'}")
    with ExitStack() as stack:
        ranks, said = [], []
        for rank, node in enumerate(nodes):
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29611",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "GROUP_RANK": str(rank),
                "TORCHELASTIC_RUN_ID": "nodes",  # as torchrun sets it
                "GLOO_SOCKET_IFNAME": node,
                "OMP_NUM_THREADS": "1",
            }
            said.append(tmp_path / f"{node}.log")
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", node, sys.executable, str(RECIPE), *settings],
                    stdout=stack.enter_context(said[-1].open("w")),
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=tmp_path,
                )
            )
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        metrics = tmp_path / "run" / "metrics.csv"
        _wait(lambda: metrics.is_file() and metrics.read_text().count("\n") > 3, 180, said)
        _ip("-n", nodes[1], "link", "set", nodes[1], "down")
        _wait(lambda: all("has not ended for" in path.read_text() for path in said), 120, said)
        for rank, path in enumerate(said):
            assert ranks[rank].poll() is None, "before any time-out"
            output = path.read_text().partition("warning: a collective")[2]
            assert re.search(rf"rank {rank} waits in \w+", output), output
            assert "a rank without such a warning has not joined" in output, output


def _wait(condition: Callable[[], bool], limit_s: float, said: list[Path]) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "\n".join(path.read_text() for path in said)
        time.sleep(0.1)
