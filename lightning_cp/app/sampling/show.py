"""Samples of a run at one step: drawn on all ranks, read and pictured on the first."""

from dataclasses import dataclass

import torch

from lightning_cp.app.sampling.picture import draw_grid
from lightning_cp.app.sampling.recognise import recognise_digits
from lightning_cp.app.training.run import Run
from lightning_cp.sampling.draw import SamplingSettings, draw_samples


@dataclass(frozen=True)
class SamplePictures:
    """Makes pictures of samples with the averaged weights, each time from the same noise.

    Args:
        shape: of one sample.
        num_classes: of the data.
        settings: how many samples and how they are drawn.
    """

    shape: tuple[int, ...]
    num_classes: int
    settings: SamplingSettings

    def make(self, run: Run, name: str) -> float:
        """Leaves `<name>.png`. Call it on every rank. Returns: the fraction that a classifier recognises."""
        state = run.state
        with state.average.swapped_in(state.module):
            drawn = draw_samples(
                *(run.ranks, state.model, self.shape),
                settings=self.settings,
                num_classes=self.num_classes,
                data_shard=run.data_shard,
                between=run.raise_if_stop_requested,
            )
        fraction = 0.0
        if run.is_first:
            seen = recognise_digits(drawn.pixels, drawn.labels)
            fraction = seen.fraction
            title = f"step {state.step}: {fraction:.0%} of {len(drawn.labels)} samples recognised"
            draw_grid(drawn.pixels, drawn.labels, seen.read, run.folder.samples / f"{name}.png", title=title)
        return float(run.ranks.broadcast(torch.tensor(fraction)))
