"""Measure how many sampled digits a classifier of real digits recognises."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cp.recipes.digits.data import DIGIT_SIZE, load_scans

NO_PREDICTION = -1


@dataclass(frozen=True)
class Recognition:
    """The classifier's predictions, [n] (-1: the sample is not finite), and the fraction of correct ones."""

    predicted: Tensor
    fraction: float


def recognise_digits(samples: Tensor, labels: Tensor) -> Recognition:
    """Classify samples with a support vector classifier fitted to all real scans.

    Args:
        samples: samples [n, 1, frames, height, width] in about [-1, 1]; the 8 × 8 window with the most ink in the
            middle frame is classified.
        labels: requested classes, [n].
    Returns: predictions and accuracy; a sample with inf or NaN in its pixels has the prediction -1.
    """
    from sklearn.svm import SVC

    scans = load_scans()
    classifier = SVC(gamma=0.001 * 64, C=10.0)  # as in scikit-learn's example; our pixel values are scaled by 1/8
    classifier.fit(scans.pixels.flatten(1).numpy(), scans.labels.numpy())
    frames = samples[:, 0, samples.shape[2] // 2].float().cpu().clamp(-1, 1)
    finite = samples.isfinite().flatten(1).all(dim=1).cpu()
    predicted = torch.full((len(samples),), NO_PREDICTION)
    if finite.any():
        predicted[finite] = torch.from_numpy(classifier.predict(inkiest_windows(frames[finite]).flatten(1).numpy()))
    return Recognition(predicted=predicted, fraction=float((predicted == labels.cpu()).float().mean()))


def inkiest_windows(frames: Tensor, size: int = DIGIT_SIZE) -> Tensor:
    """Crop the size × size window with the most ink from each frame: [n, h, w] -> [n, size, size].

    A digit with empty margins fits in several windows: the middle one of those with nearly the most ink is taken.
    """
    windows = frames.unfold(1, size, 1).unfold(2, size, 1)  # [n, rows, columns, size, size]
    ink = (windows + 1).sum(dim=(3, 4))
    near = (ink >= 0.99 * ink.amax(dim=(1, 2), keepdim=True)).float()
    middles = []
    for dim in (1, 2):
        positions = torch.arange(ink.shape[dim]).float()
        weights = near.amax(dim=3 - dim)
        middles.append(((weights * positions).sum(dim=1) / weights.sum(dim=1)).round().long())
    return windows[torch.arange(len(frames)), middles[0], middles[1]]
