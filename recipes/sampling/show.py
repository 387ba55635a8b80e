"""Draw samples of a run on all ranks; classify them, if they are digits, and plot them on the first rank."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_cp.files import writing_new
from lightning_cp.recipes.digits.recognise import recognise_digits
from lightning_cp.recipes.training.run import Run
from lightning_cp.sampling.draw import SamplingSettings, draw_samples

_MAX_COLUMNS = 12


def draw_grid(samples: Tensor, labels: Tensor, predicted: Tensor | None, path: Path, *, title: str) -> None:
    """Draw one row per class. Samples that were not recognised have a red frame and show the predicted class.

    Args:
        samples: samples [n, channels, frames, height, width] in about [-1, 1]. Three channels are drawn as RGB;
            otherwise the first one is drawn, with 1 as black. A row shows up to 12 pictures of its class or, for clips,
            up to 12 frames of the first clip of its class.
        labels: requested classes, [n].
        predicted: classes predicted by the classifier, [n]; negative for samples with non-finite pixels. None: no red
            frames.
        path: path of the PNG.
        title: title above the grid.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: no state, no display

    classes = sorted(set(labels.tolist()))
    predicted = labels if predicted is None else predicted
    rows = [_row(samples, torch.nonzero(labels == label).flatten(), predicted) for label in classes]
    columns = max(len(row) for row in rows)
    figure = Figure(figsize=(0.62 * columns + 0.7, 0.62 * len(rows) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for label, row, axes in zip(classes, rows, grid, strict=True):
        axes[0].set_ylabel(str(label), rotation=0, fontsize=13, fontweight="bold", ha="right", va="center")
        for ax in axes:
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        for ax, (image, prediction) in zip(axes, row, strict=False):
            shown = image.float().clamp(-1, 1)  # [c, h, w]
            pixels = (shown.movedim(0, -1) + 1) / 2 if len(shown) == 3 else -shown[0]
            ax.imshow(pixels.numpy(), cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
            ax.spines[:].set(visible=True, color="0.8")
            if prediction != label:
                ax.spines[:].set(color="tab:red", linewidth=2)
                position = {"ha": "right", "va": "top", "transform": ax.transAxes}
                ax.text(
                    0.95, 0.92, f"{prediction}?" if prediction >= 0 else "NaN", color="tab:red", fontsize=8, **position
                )
    figure.suptitle(title, fontsize=11)
    with writing_new(path):
        figure.savefig(path, dpi=120)


def _row(samples: Tensor, chosen: Tensor, predicted: Tensor) -> list[tuple[Tensor, int]]:
    if samples.shape[2] == 1:
        return [(samples[i, :, 0], int(predicted[i])) for i in chosen[:_MAX_COLUMNS].tolist()]
    first = int(chosen[0])
    frames = torch.linspace(0, samples.shape[2] - 1, min(_MAX_COLUMNS, samples.shape[2])).round().long()
    return [(samples[first, :, frame], int(predicted[first])) for frame in frames.tolist()]


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
            draw_grid(drawn.pixels, drawn.labels, predicted, run.folder / "samples" / f"{name}.png", title=title)
        return float(run.ranks.broadcast(torch.tensor(fraction))) if self.digits else None
