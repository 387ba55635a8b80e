"""Measure a step cache on a run's model: how much it skips, the time it saves and what the samples lose.

    python -m lightning_cp.app.benchmark.step_caches RUN PLOT.png [COUNT]

RUN is the folder of a run of recipes/train.py on digits. One process on one thread draws the same samples without a
cache and with FirstBlockCache at several thresholds. Time is CPU time, which other programs on the machine change less
than wall time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.app.runs.sweep import RESOLVED
from lightning_cp.app.sampling.recognise import recognise_digits
from lightning_cp.app.sampling.step_cache import CachedSteps, enable_cache, skipped_fraction
from lightning_cp.app.sampling.trained import SharedGuidance, load_denoiser
from lightning_cp.app.settings.foreign import read_foreign_run
from lightning_cp.checkpoint import find_checkpoint
from lightning_cp.data import RandomStream
from lightning_cp.pipelines import sampling_ranks
from lightning_cp.sampling.ode import integrate_flow
from lightning_cp.training.noise import sample_noise

THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
_CACHE = {"_target_": "diffusers.FirstBlockCacheConfig"}


class Measured(NamedTuple):
    """Samples drawn with one threshold (0: without a cache).

    skipped: fraction of the block calls that were skipped. seconds: CPU time.
    psnr: against the samples without a cache, for a range of 2, in dB. recognised: by a classifier of real digits.
    """

    threshold: float
    skipped: float
    seconds: float
    psnr: float
    recognised: float


def measure(run: Path, count: int) -> list[Measured]:
    """Draw `count` samples without a cache and with each threshold."""
    trained = read_foreign_run(run / ".hydra" / RESOLVED)
    module: Any = load_denoiser(trained, find_checkpoint(str(run), run))
    transformer = module.transformer
    data, settings = trained.data, trained.sampling
    parallel = ContextParallelConfig()
    ranks, labels = sampling_ranks(parallel), torch.arange(count) % data.num_classes
    apply_context_parallel(transformer, parallel)
    shape = (count, data.channels, data.frames, data.height, data.width)
    noise = sample_noise(shape, seed=0, step=0, first_index=0, stream=RandomStream.SAMPLE, device=torch.device("cpu"))
    found: list[Measured] = []
    reference: Tensor | None = None
    for threshold in (0.0, *THRESHOLDS):
        steps = CachedSteps(transformer, ranks, calls=2 * settings.num_inference_steps)
        if threshold:
            enable_cache({**_CACHE, "threshold": threshold}, [transformer], lambda: 0.0)
        started = time.process_time()
        samples = integrate_flow(
            SharedGuidance(module, ranks, around=steps),
            noise,
            labels,
            null_label=data.num_classes,
            guidance=settings.guidance_scale,
            num_steps=settings.num_inference_steps,
        )
        seconds, skipped = time.process_time() - started, skipped_fraction([transformer])
        if threshold:
            transformer.disable_cache()
        reference = samples if reference is None else reference
        error = float((samples - reference).square().mean())
        psnr = float("inf") if not error else float(10 * torch.log10(torch.tensor(4 / error)))
        found.append(Measured(threshold, skipped, seconds, psnr, recognise_digits(samples, labels).fraction))
        print(found[-1], flush=True)
    return found


def draw(measured: list[Measured], path: Path) -> None:
    """Plot quality and time against the threshold."""
    from matplotlib.figure import Figure

    plain, *cached = measured
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    thresholds = [x.threshold for x in cached]
    panels: tuple[tuple[str, list[float]], ...] = (
        ("block calls skipped, %", [100 * x.skipped for x in cached]),
        ("CPU time, % of no cache", [100 * x.seconds / plain.seconds for x in cached]),
        ("PSNR to no cache, dB", [x.psnr for x in cached]),
        (f"recognised, % (no cache: {100 * plain.recognised:.0f})", [100 * x.recognised for x in cached]),
    )
    axes: Any = figure.subplots(1, len(panels))
    for axis, (title, values) in zip(axes, panels, strict=True):
        axis.plot(thresholds, values, marker="o")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("threshold")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(run: str, plot: str, count: str = "20") -> None:
    """Measure, and draw the plot."""
    torch.set_num_threads(1)
    draw(measure(Path(run).absolute(), int(count)), Path(plot))


if __name__ == "__main__":
    main(*sys.argv[1:])
