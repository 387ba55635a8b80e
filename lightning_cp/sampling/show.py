"""Samples of a run at one step: drawn on all ranks, read and pictured on the first."""

from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.fabric import Fabric

from lightning_cp.sampling.draw import SamplingSettings, draw_samples
from lightning_cp.sampling.picture import draw_grid
from lightning_cp.sampling.recognise import recognise_digits
from lightning_cp.training.run import data_place
from lightning_cp.training.state import TrainState


@dataclass(frozen=True)
class SamplePictures:
    """Makes pictures of samples with the averaged weights, each time from the same noise.

    Args:
        shape: of one sample.
        num_classes: of the data.
        settings: how many samples and how they are drawn.
        folder: of the pictures, on the first rank.
    """

    shape: tuple[int, ...]
    num_classes: int
    settings: SamplingSettings
    folder: Path

    def make(self, fabric: Fabric, state: TrainState, name: str) -> float:
        """Leaves `<name>.png`. Call it on every rank. Returns: the fraction that a classifier recognises."""
        with state.average.swapped_in(state.module):
            drawn = draw_samples(
                fabric,
                state.model,
                self.shape,
                settings=self.settings,
                num_classes=self.num_classes,
                place=data_place(fabric),
            )
        fraction = 0.0
        if fabric.is_global_zero:
            seen = recognise_digits(drawn.pixels, drawn.labels)
            fraction = seen.fraction
            title = f"step {state.step}: {fraction:.0%} of {len(drawn.labels)} samples recognised"
            draw_grid(drawn.pixels, drawn.labels, seen.read, self.folder / f"{name}.png", title=title)
        return float(fabric.broadcast(torch.tensor(fraction)))
