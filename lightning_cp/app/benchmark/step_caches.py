"""Measure a step cache on a run's model: how much it skips, the time it saves and what the samples lose.

    python -m lightning_cp.app.benchmark.step_caches RUN PLOT.png [COUNT]

RUN is the folder of a run of lightning-cp train on digits. One process on one thread draws the same samples without a
cache and with FirstBlockCache at several thresholds. Time is CPU time, which other programs on the machine change less
than wall time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.app.benchmark.trained_digits import Panel, draw_panels, load_digits, psnr
from lightning_cp.app.sampling.recognise import recognise_digits
from lightning_cp.app.sampling.step_cache import CachedSteps, enable_cache, skipped_fraction

THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
_CACHE = {"_target_": "diffusers.FirstBlockCacheConfig"}


class ThresholdRow(NamedTuple):
    """Samples drawn with one threshold (0: without a cache).

    skipped: fraction of the block calls that were skipped. seconds: CPU time.
    psnr: PSNR in dB relative to the samples without a cache, for values in [-1, 1].
    recognised: fraction of the samples that a classifier of real digits recognises.
    """

    threshold: float
    skipped: float
    seconds: float
    psnr: float
    recognised: float


def measure_thresholds(run: Path, count: int) -> list[ThresholdRow]:
    """Draw `count` samples without a cache and with each threshold."""
    digits = load_digits(run, count)
    transformer = digits.transformer
    measured: list[ThresholdRow] = []
    reference: Tensor | None = None
    for threshold in (0.0, *THRESHOLDS):
        steps = CachedSteps(transformer, digits.ranks, calls=digits.evaluations)
        if threshold:
            enable_cache({**_CACHE, "threshold": threshold}, [transformer], lambda: 0.0)
        started = time.process_time()
        samples = digits.draw(steps)
        seconds, skipped = time.process_time() - started, skipped_fraction([transformer])
        if threshold:
            transformer.disable_cache()
        reference = samples if reference is None else reference
        recognised = recognise_digits(samples, digits.labels).fraction
        measured.append(ThresholdRow(threshold, skipped, seconds, psnr(samples, reference), recognised))
        print(measured[-1], flush=True)
    return measured


def draw_thresholds(measured: list[ThresholdRow], path: Path) -> None:
    """Plot quality and time against the threshold."""
    plain, *cached = measured
    panels = [
        Panel("block calls skipped, %", {"": [100 * x.skipped for x in cached]}),
        Panel("CPU time, % of no cache", {"": [100 * x.seconds / plain.seconds for x in cached]}),
        Panel("PSNR to no cache, dB", {"": [x.psnr for x in cached]}),
        Panel(f"recognised, % (no cache: {100 * plain.recognised:.0f})", {"": [100 * x.recognised for x in cached]}),
    ]
    draw_panels(panels, [x.threshold for x in cached], "threshold", path)


def main(run: str, plot: str, count: str = "20") -> None:
    """Measure, and draw the plot."""
    torch.set_num_threads(1)
    draw_thresholds(measure_thresholds(Path(run).absolute(), int(count)), Path(plot))


if __name__ == "__main__":
    main(*sys.argv[1:])
