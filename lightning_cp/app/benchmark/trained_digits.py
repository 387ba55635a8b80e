"""Draw the same samples of a digits run in several ways, compare them and plot what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.app.sampling.trained import SharedGuidance, load_denoiser
from lightning_cp.app.settings.trained import TrainedDenoiser
from lightning_cp.config import ContextParallelConfig
from lightning_cp.data import RandomStream
from lightning_cp.engine.apply import parallelize
from lightning_cp.engine.installed import Installed
from lightning_cp.files import writing_new
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.pipelines import sampling_ranks
from lightning_cp.sampling.ode import integrate_flow
from lightning_cp.training.noise import sample_noise


class TrainedDigits(NamedTuple):
    """The denoiser of a digits run on one rank, and the noise and labels of its samples."""

    trained: TrainedDenoiser
    module: Any
    installed: Installed
    ranks: SampleGroups
    noise: Tensor
    labels: Tensor

    @property
    def transformer(self) -> Any:
        """Return the context-parallel transformer."""
        return self.module.transformer

    @property
    def evaluations(self) -> int:
        """Return the number of forwards of one sample: two for each step."""
        return 2 * self.trained.num_inference_steps

    def draw(self, around: Callable[[float], AbstractContextManager[None]]) -> Tensor:
        """Draw all samples. Args: around: context of each forward, by time."""
        return integrate_flow(
            SharedGuidance(self.module, self.ranks, around=around),
            self.noise,
            self.labels,
            null_label=self.trained.num_classes,
            guidance=self.trained.guidance_scale,
            num_steps=self.trained.num_inference_steps,
        )


class Panel(NamedTuple):
    """One panel of a plot: values against x, for each named line."""

    title: str
    lines: dict[str, Sequence[float]]


def load_digits(run: Path, count: int) -> TrainedDigits:
    """Load the denoiser of a run of lightning-cp train, for `count` samples on one rank."""
    trained, parallel = TrainedDenoiser.read(run), ContextParallelConfig()
    module: Any = load_denoiser(run)
    installed = parallelize(module.transformer, parallel)
    shape = (count, *trained.size)
    noise = sample_noise(shape, seed=0, step=0, first_index=0, stream=RandomStream.SAMPLE, device=torch.device("cpu"))
    labels = torch.arange(count) % trained.num_classes
    return TrainedDigits(trained, module, installed, sampling_ranks(parallel), noise, labels)


def psnr(samples: Tensor, exact: Tensor) -> float:
    """Return the PSNR for a range of 2, in dB."""
    error = float((samples - exact).square().mean())
    return 10 * math.log10(4 / error) if error else math.inf


def draw_panels(panels: Sequence[Panel], x: Sequence[float], name: str, path: Path) -> None:
    """Plot the panels side by side against `x`, which is called `name`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.75 * len(panels), 3.2), layout="constrained")
    axes: Any = figure.subplots(1, len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        for label, values in panel.lines.items():
            axis.plot(x, values, marker="o", label=label)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(name)
        axis.set_xticks(x, [f"{value:g}" for value in x], fontsize=8)
        axis.grid(alpha=0.3)
    if len(panels[0].lines) > 1:
        axes[0].legend(fontsize=8)
    with writing_new(path):
        figure.savefig(path, dpi=110)
