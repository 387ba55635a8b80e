"""The compile cache of torch finds the graphs of a parallel model again in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def _counts(folder: Path, rendezvous: str) -> list[tuple[int, int, int]]:
    """(hits, misses, bypasses) of each rank, in new processes that share one cache folder."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "PYTHONHASHSEED": rendezvous}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.faults.engine.compile_cache",
                str(rank),
                str(folder / f"rendezvous_{rendezvous}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        done = [(*rank.communicate(timeout=400), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for out, error, code in done:
        assert code == 0, out + error
    lines = [next(line for line in out.splitlines() if line.startswith("cache ")) for out, _, _ in done]
    return [tuple(int(x) for x in line.split()[1:]) for line in lines]  # type: ignore[misc]


@pytest.mark.full
def test_a_second_process_hits_the_cache(tmp_path: Path) -> None:
    for hits, misses, _ in _counts(tmp_path, "1"):
        assert hits + misses > 0
    for hits, misses, bypasses in _counts(tmp_path, "2"):
        assert hits > 0
        assert misses == bypasses == 0
