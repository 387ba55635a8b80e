"""The benchmark measures every subject, and leaves a table, pictures and traces."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.recipe import ROOT

QUICK = ("bench=quick", "repeats=2", "seconds=0", "attention.lengths=[128]")


def _bench(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "recipes/bench.py", f"hydra.run.dir={folder}", *QUICK, *settings]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_every_subject_is_measured_in_one_run(tmp_path: Path) -> None:
    done = _bench(tmp_path, f"page={tmp_path / 'page.md'}")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    by_name = {(row["workload"], row["subject"]): row for row in rows}
    for workload in ("attention", "training", "sampling"):
        one = by_name[workload, "one process, one thread"]
        for mode in ("ring allgather", "ring alltoall", "Ulysses"):
            row = by_name[workload, mode]
            assert float(row["ratio"]) == pytest.approx(2 * float(row["best_s"]) / float(one["best_s"]))
            assert float(row["best_s"]) <= float(row["median_s"])
            assert int(row["sent_bytes"]) > 0
            assert 0 <= float(row["waited"]) < 1
        assert not by_name[workload, "diffusers Ulysses"]["refused"]
        assert one["sent_bytes"] == ""
        assert (tmp_path / f"bench_{workload}.png").read_bytes().startswith(b"\x89PNG")
    for subject in ("one call: its queries", "one call: its heads", "ring allgather", "ring alltoall", "Ulysses"):
        assert by_name["one_rank", subject]["ranks"] == "2"
    alone, together = by_name["one_rank", "Ulysses"], by_name["attention", "Ulysses"]
    assert alone["sent_bytes"] == together["sent_bytes"], "it does what a rank does"
    assert "return_lse" in by_name["training", "diffusers ring"]["refused"], "what cannot be done is told"
    # K and V once forward and once backward, and their gradients
    assert int(by_name["attention", "ring alltoall"]["sent_bytes"]) == 3 * 2 * 64 * 8 * 64 * 4
    page = (tmp_path / "page.md").read_text()
    assert "## Attention, 128 tokens, 2 ranks" in page
    assert "python recipes/bench.py bench=quick repeats=2" in page
    trace = json.loads((tmp_path / "traces" / "attention_128_2" / "ring_alltoall.json").read_text())
    names = {event["name"].rpartition(" ")[0] for event in trace["traceEvents"]}
    assert {"lightning_cp::exchange", "lightning_cp::wait"} <= names


def test_a_wrong_setting_is_one_error(tmp_path: Path) -> None:
    for given, said in (
        ("workloads=[atention]", "workloads=['atention']: valid are attention, one_rank, training, sampling"),
        ("ranks=[1]", "ranks=[1]: numbers of at least 2"),
        ("attention.lengths=[0]", "attention.lengths=[0]: numbers of at least 1"),
        ("workloads=[]", "workloads=[]: valid are attention"),
        ("~model", "these settings have no model"),
    ):
        done = _bench(tmp_path, given)
        assert done.returncode == 1
        assert said in done.stderr
        assert "Traceback" not in done.stderr
