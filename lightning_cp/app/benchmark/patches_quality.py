"""Measure the deviation of samples drawn in patches (PipeFusion) from the exact samples of a run's model.

    python -m lightning_cp.app.benchmark.patches_quality RUN PLOT.png [COUNT]

RUN is the folder of a run of lightning-cp train on digits. One process draws the same samples exactly, and for each
number of patches and of warm-up evaluations. The result does not depend on the number of stages
(docs/pipefusion_reference.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.app.benchmark.trained_digits import Panel, TrainedDigits, draw_panels, load_digits, psnr
from lightning_cp.app.sampling.recognise import recognise_digits
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.guidance.step_clock import StepClock
from lightning_cp.pipelines.pipefusion.runner import make_patch_runners
from lightning_cp.undoable import Undo, intercept_calls, undo_all

PATCHES = (2, 4, 8)
WARMUP = (1, 2, 4)


class QualityRow(NamedTuple):
    """Samples drawn in patches (1: exactly), with `warmup` first evaluations of the whole sequence.

    psnr: PSNR in dB relative to the exact samples, for values in [-1, 1].
    largest: largest deviation of a value.
    recognised: fraction of the samples that a classifier of real digits recognises.
    """

    patches: int
    warmup: int
    psnr: float
    largest: float
    recognised: float


def samples_in_patches(digits: TrainedDigits, patches: int, warmup: int) -> Tensor:
    """Draw the samples. Each evaluation is one forward, with both branches of guidance in its batch."""
    clock = StepClock()
    votes, installed = Votes("the loop", digits.ranks.control), {"transformer": digits.installed}
    runners = make_patch_runners(installed, digits.ranks, votes, pipe=1, patches=patches, warmup=warmup, clock=clock)
    undo = list[Undo]()
    for runner in runners.values():  # none for a single patch
        undo += [*runner.install(), intercept_calls(digits.transformer, runner.call)]

    @contextmanager
    def evaluation(time: float) -> Iterator[None]:
        yield
        clock.end_step()

    try:
        return digits.draw(evaluation)
    finally:
        undo_all(undo)


def measure_patches(run: Path, count: int) -> list[QualityRow]:
    """Draw `count` samples exactly and with each setting."""
    digits = load_digits(run, count)
    exact = samples_in_patches(digits, patches=1, warmup=1)
    measured: list[QualityRow] = []
    for patches, warmup in [(1, 1), *((n, w) for n in PATCHES for w in WARMUP)]:
        samples = exact if patches == 1 else samples_in_patches(digits, patches, warmup)
        largest, recognised = float((samples - exact).abs().max()), recognise_digits(samples, digits.labels).fraction
        measured.append(QualityRow(patches, warmup, psnr(samples, exact), largest, recognised))
        print(measured[-1], flush=True)
    return measured


def draw_quality(measured: list[QualityRow], path: Path) -> None:
    """Plot the deviation against the number of patches, with a line for each warm-up."""
    exact, *others = measured
    lines = {f"warm-up {warmup}": [x for x in others if x.warmup == warmup] for warmup in WARMUP}
    panels = [
        Panel("PSNR to exact, dB", {name: [x.psnr for x in line] for name, line in lines.items()}),
        Panel("largest deviation", {name: [x.largest for x in line] for name, line in lines.items()}),
        Panel(
            f"recognised, % (exact: {100 * exact.recognised:.0f})",
            {name: [100 * x.recognised for x in line] for name, line in lines.items()},
        ),
    ]
    draw_panels(panels, PATCHES, "patches", path)


def main(run: str, plot: str, count: str = "20") -> None:
    """Measure, and draw the plot."""
    torch.set_num_threads(1)
    draw_quality(measure_patches(Path(run).absolute(), int(count)), Path(plot))


if __name__ == "__main__":
    main(*sys.argv[1:])
