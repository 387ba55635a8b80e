"""Kill all ranks of precompute at random moments: the finished cache is that of a run without interruptions."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_cp.latent_cache import LatentCache
from tests.harness import warm
from tests.unit.finetune.precompute.made import PICTURES, contents, encoded, pictures, pipeline

pytestmark = pytest.mark.filterwarnings("ignore")
_RANKS = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch, torch.distributed as dist
from pathlib import Path
import lightning_cp.finetune.precompute.run, diffusers, transformers
from lightning_cp.finetune.precompute import EncodingRanks, encode
from lightning_cp.finetune.families.image.flux import Flux
from tests.harness import warm
from tests.unit.finetune.precompute.made import PICTURES, encoded
import os, time
torch.set_num_threads(1)
pipe, data, out = map(Path, sys.argv[1:4])
slow = Flux.encode_media
Flux.encode_media = lambda *a, **k: (os.write(1, b"encoding\\n"), time.sleep(0.02), slow(*a, **k))[2]
store, ranks, world = out.with_name(f"store {os.getpid()}"), [], 2
for rank in range(world):
    child = os.fork()
    if child == 0:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        encoded(pipe, data, out, PICTURES, EncodingRanks.of_world())
        os._exit(0)
    ranks.append(child)
print("started", flush=True)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
sys.exit(max(map(abs, codes)))
"""


def _started(pipe: Path, data: Path, out: Path, samples: int = 0) -> subprocess.Popen[str]:
    """Start two ranks. Args: samples: return when so many are being encoded, or all are."""
    command = [sys.executable, "-c", _RANKS, str(pipe), str(data), str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    process = warm.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    for _ in range(samples):
        process.stdout.readline()
    return process


def _ended(process: subprocess.Popen[str], after_s: float | None) -> int:
    """Wait, or kill all its processes after a time. Returns: the exit code."""
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    code: int = process.returncode
    return code


@pytest.mark.full
@pytest.mark.parametrize("kills", [3, 50])
def test_a_killed_run_loses_and_doubles_nothing(kills: int, tmp_path: Path) -> None:
    count = 30 if kills == 3 else 400
    data, pipe, rng = pictures(tmp_path / "data", count), pipeline(tmp_path / "pipe"), random.Random(kills)
    encoded(pipe, data, tmp_path / "whole", PICTURES)
    codes, stored = [], []
    for _ in range(kills):
        samples = rng.choice([0, 1, 7, 9])  # 0: while the pipeline is loaded, or captions are encoded
        run = _started(pipe, data, tmp_path / "out", samples)
        codes.append(_ended(run, rng.uniform(0, 0.3 if samples else 1.0)))
        stored.append(len(list((tmp_path / "out").glob("media/*/*.safetensors"))))
        time.sleep(0.05)
    assert -signal.SIGKILL in codes
    assert stored == sorted(stored)  # nothing that was stored is lost
    assert stored[-1] > 0
    assert _ended(_started(pipe, data, tmp_path / "out"), None) == 0
    assert len(LatentCache(tmp_path / "out")) == count
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    print({"codes": codes, "stored": stored})
