"""Kill the writers of a cache again and again, and compare the cache with what was written.

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
from pathlib import Path

from lightning_cp.latent_cache import CacheWriter, prepare_cache
from tests.unit.finetune.latent_cache.made import CAPTIONS, add, check, index, make

RANKS, SAMPLES = 2, 3000


def write(folder: Path) -> None:
    """Write with two ranks in turn, slowly enough to be killed at any point."""
    with prepare_cache(folder, index()):
        writers = [CacheWriter(folder, rank=rank, shard_bytes=600) for rank in range(RANKS)]
        for i in range(SAMPLES):
            add(writers[i % RANKS], [i], CAPTIONS[i % RANKS :: RANKS] if i % 7 == 0 else ())


def forked(folder: Path) -> int:
    """Start a process that writes; it shares the imports of this one."""
    process = os.fork()
    if process == 0:
        try:
            write(folder)
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # the samples are too many to be written before the kill
    return process


def stored(folder: Path) -> int:
    """Count what a new run need not encode again."""
    with prepare_cache(folder, index()):
        writer = CacheWriter(folder)
        count = len(writer.done_ids()) + len(writer.done_texts())
        writer.close()
    return count


def main(folder: Path, kills: int) -> None:
    rng, signals, kept = random.Random(kills), [], []
    for number in range(kills):
        before, process = lines(folder), forked(folder)
        while (
            number == kills - 1 and lines(folder) == before
        ):  # on a loaded machine, none of the others may have written
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.3))
        os.kill(process, signal.SIGKILL)
        signals.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        kept.append(stored(folder))
    count = 1 + max((int(name[-4:]) for name in ids(folder)), default=0)
    check(make(folder, count, RANKS), count)
    print(json.dumps({"signals": signals, "kept": kept}))


def lines(folder: Path) -> int:
    """Count the written lines of rows."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("rows-*-media.jsonl"))


def ids(folder: Path) -> list[str]:
    """List the stored samples."""
    lines = [json.loads(line) for path in folder.glob("rows-*-media.jsonl") for line in path.read_text().splitlines()]
    return [line["id"] for line in lines if "id" in line]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
