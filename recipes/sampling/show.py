"""Draw samples of a run on all ranks; classify them, if they are digits, and plot them on the first rank."""

from dataclasses import dataclass

import torch

from lightning_cp.recipes.digits.recognise import recognise_digits
from lightning_cp.recipes.sampling.picture import draw_grid
from lightning_cp.recipes.training.run import Run
from lightning_cp.sampling.draw import SamplingSettings, draw_samples


@dataclass(frozen=True)
class SamplePictures:
    """Draw sample pictures with the EMA weights, always from the same noise.

    Args:
        shape: shape of one sample.
        num_classes: number of classes of the data.
        settings: number of samples and how to draw them.
        digits: True if the samples are digits, which are classified.
    """

    shape: tuple[int, ...]
    num_classes: int
    settings: SamplingSettings
    digits: bool = True

    def make(self, run: Run, name: str) -> float | None:
        """Write `<name>.png`. Call it on every rank.

        Returns: fraction of samples that the classifier recognises; None if they are no digits.
        """
        state = run.state
        with state.average.swapped_in(state.module):
            drawn = draw_samples(
                run.ranks,
                state.model,
                self.shape,
                settings=self.settings,
                num_classes=self.num_classes,
                data_shard=run.data_shard,
                between=run.raise_if_stop_requested,
            )
        fraction = 0.0
        if run.is_first:
            title, predicted = f"step {state.step}", None
            if self.digits:
                recognition = recognise_digits(drawn.pixels, drawn.labels)
                fraction, predicted = recognition.fraction, recognition.predicted
                title += f": {fraction:.0%} of {len(drawn.labels)} samples recognised"
            draw_grid(drawn.pixels, drawn.labels, predicted, run.folder.samples / f"{name}.png", title=title)
        return float(run.ranks.broadcast(torch.tensor(fraction))) if self.digits else None
