"""Run ranks behind slow links: each in a network namespace of its own, all on one bridge (Linux, as root)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf

from lightning_cp.checkpoint.folder import temporary_folder
from lightning_cp.launch.rank import Target, target_of
from lightning_cp.recipes.runs.ranks import ROWS

_PORT = 29500  # of rank 0's namespace, in which nothing else listens
_RANK = "import sys; from pathlib import Path; from lightning_cp.launch.rank import load_target; "
_RANK += "load_target(sys.argv[1])(Path(sys.argv[2]))"


def check_links(link_mbit: Any) -> str:
    """Check the setting `link_mbit`. Returns: what is wrong; "" if nothing is."""
    if link_mbit is None:
        return ""
    if not isinstance(link_mbit, (int, float)) or not link_mbit > 0:
        return f"link_mbit={link_mbit} is not valid: must be null or a number of Mbit/s above 0"
    if os.name != "posix" or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return f"link_mbit={link_mbit} makes network namespaces: it needs Linux, root, and the programs ip and tc"
    return ""


def rows_over_links(function: Target, settings: Mapping[str, Any], ranks: int, mbit: float) -> list[Any]:
    """Run a function that is decorated with `on_ranks`, see there. Returns: its rows. Exits if a rank fails."""
    with temporary_folder() as folder, _namespaces(ranks, mbit) as names:
        path, rows = folder / "settings.yaml", folder / ROWS
        OmegaConf.save({**settings}, path)
        shared = {"WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": f"{_PORT}"}
        shared |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-c", _RANK, target_of(function), str(path)],
                env={**os.environ, **shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            )
            for rank, name in enumerate(names)
        ]
        try:
            codes = [process.wait(settings["limit_s"]) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            sys.exit(f"error: the ranks behind links of {mbit} Mbit/s ended with {codes}")
        return [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]


@contextmanager
def _namespaces(count: int, mbit: float) -> Iterator[list[str]]:
    """Make network namespaces whose interface `eth0` sends at most `mbit` Mbit/s; remove them at the end."""
    job = f"lcp{os.getpid()}"
    names = [f"{job}n{i}" for i in range(count)]
    try:
        _ip(f"link add {job} type bridge")
        _ip(f"link set {job} up")
        for number, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"link add {job}v{number} type veth peer name eth0 netns {name}")
            _ip(f"link set {job}v{number} master {job} up")
            _ip(f"-n {name} addr add 10.77.0.{number + 1}/24 dev eth0")
            for device in ("eth0", "lo"):
                _ip(f"-n {name} link set {device} up")
            _ip(f"netns exec {name} tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 256kb latency 2s")
        yield names
    finally:
        for words in (*(f"netns delete {name}" for name in names), f"link delete {job}"):
            subprocess.run(["ip", *words.split()], check=False, stderr=subprocess.DEVNULL)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
