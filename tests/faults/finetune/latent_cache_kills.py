"""Kill the writers of a cache again and again, complete it by three runs, and compare it with what was written.

Usage: python -m tests.faults.finetune.latent_cache_kills FOLDER KILLS.
Prints how many samples and texts each run found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from lightning_cp.latent_cache import CacheWriter, LatentCache, prepare_cache
from tests.unit.finetune.latent_cache.made import CAPTIONS, add, check, index, make, row

RANKS, SAMPLES = 2, 3000


def write(folder: Path) -> None:
    """Write with two ranks in turn, slowly enough to be killed at any point."""
    prepare_cache(folder, index())
    writers = [CacheWriter(folder) for _ in range(RANKS)]
    for i in range(SAMPLES):
        add(writers[i % RANKS], [i], CAPTIONS[i % RANKS :: RANKS] if i % 7 == 0 else ())


def forked(folder: Path, write: Callable[[Path], object]) -> int:
    """Start a process that writes; it shares the imports of this one."""
    process = os.fork()
    if process == 0:
        try:
            write(folder)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return process


def stored(folder: Path) -> int:
    """Count what a new run need not encode again."""
    prepare_cache(folder, index())
    writer = CacheWriter(folder)
    media = [writer.take_media({"id": row(i).id, "source_hash": row(i).source_hash}) for i in range(files(folder))]
    return sum(media) + sum(map(writer.take_text, CAPTIONS))


def main(folder: Path, kills: int) -> None:
    rng, signals, kept = random.Random(kills), [], []
    for number in range(kills):
        before, process = files(folder), forked(folder, write)
        while (
            number == kills - 1 and files(folder) == before
        ):  # on a loaded machine, none of the others may have written
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.3))
        os.kill(process, signal.SIGKILL)
        signals.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        kept.append(stored(folder))
    count = files(folder)
    runs = [forked(folder, lambda folder: make(folder, count, RANKS)) for _ in range(3)]  # at the same time
    assert [os.waitpid(run, 0)[1] for run in runs] == [0, 0, 0]
    check(LatentCache(folder), count)
    print(json.dumps({"signals": signals, "kept": kept}))


def files(folder: Path) -> int:
    """Count the files of samples, which are written in order."""
    return len(list(folder.glob("media/*/*.safetensors")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
