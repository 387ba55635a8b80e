"""torchrun with two agents, as on two nodes, and its restarts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from lightning_cp.launch.machine import free_port
from tests.e2e.recipe import SMALL, ranks_of, started

RUN = (*SMALL, "strategy=cp", "ring=2", "progress=false", "checkpoint_every=2", "resume=auto")


def wait_until(done: Callable[[], bool], *, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.full
def test_the_ranks_of_other_nodes_end_soon_after_an_agent(tmp_path: Path) -> None:
    folder, port = tmp_path / "run", free_port()
    agents = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1")
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                started(
                    *(*RUN, "max_steps=100000", "num_nodes=2", "devices=1"),
                    folder=folder,
                    launcher=(*agents, f"--master-port={port}", f"--node-rank={node}"),
                )
            )
            for node in range(2)
        )
        wait_until((folder / "checkpoints" / "step_00000002").is_dir)
        (orphan,) = psutil.Process(second.pid).children()
        os.kill(second.pid, signal.SIGKILL)
        _, stderr = first.communicate(timeout=120)
        assert first.returncode not in (0, None)
        orphan.wait(timeout=60)
        assert "torchrun's agent" in second.communicate(timeout=60)[1]
    lines = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert lines[0].startswith("error: rank 0 lost the connection to another rank, which has exited"), stderr
    assert "gloo" not in stderr
    assert "logs of the ranks" not in stderr


@pytest.mark.full
def test_a_restart_by_torchrun_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    torchrun = (
        *("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d"),
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",  # a static rendezvous keeps the addresses of the ended ranks
    )
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    settings = (*RUN, "max_steps=60", f"output_root={outputs}")
    with started(*settings, folder=Path(f"{outputs}/${{now:%H-%M-%S}}"), launcher=torchrun) as process:
        wait_until(lambda: any(outputs.glob("*/checkpoints/step_00000002")))
        ranks_of(process)[1].kill()
        stdout, stderr = process.communicate(timeout=150)
    assert process.returncode == 0, stderr
    assert "resume=auto: no checkpoint of this command under" in stdout
    assert "Resuming after step" in stdout
