"""How many sampled digits a classifier of real digits recognises."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cp.app.digits import DIGIT_SIZE, load_scans

NOTHING_READ = -1


@dataclass(frozen=True)
class Recognition:
    """What the classifier read, [n] (-1: nothing, the pixels are not finite), and the fraction that is right."""

    read: Tensor
    fraction: float


def recognise_digits(samples: Tensor, labels: Tensor) -> Recognition:
    """Reads samples with a support vector classifier fitted to all real scans.

    Args:
        samples: [n, 1, frames, height, width] in about [-1, 1]; of a clip, the middle frame's inkiest 8 × 8 window is
            read.
        labels: what was asked for, [n].
    Returns: of a sample with inf or NaN among its pixels, that nothing was read.
    """
    from sklearn.svm import SVC

    scans = load_scans()
    classifier = SVC(gamma=0.001 * 64, C=10.0)  # scikit-learn's own example, in our units (1/8 of theirs)
    classifier.fit(scans.pixels.flatten(1).numpy(), scans.labels.numpy())
    frames = samples[:, 0, samples.shape[2] // 2].float().cpu().clamp(-1, 1)
    finite = samples.isfinite().flatten(1).all(dim=1).cpu()
    read = torch.full((len(samples),), NOTHING_READ)
    if finite.any():
        read[finite] = torch.from_numpy(classifier.predict(inkiest_windows(frames[finite]).flatten(1).numpy()))
    return Recognition(read=read, fraction=float((read == labels.cpu()).float().mean()))


def inkiest_windows(frames: Tensor, size: int = DIGIT_SIZE) -> Tensor:
    """The size × size window with the most ink of each frame: [n, h, w] -> [n, size, size].

    A digit with empty margins is whole in several windows: of those with nearly the most ink, the middle one is taken.
    """
    windows = frames.unfold(1, size, 1).unfold(2, size, 1)  # [n, rows, columns, size, size]
    ink = (windows + 1).sum(dim=(3, 4))
    near = (ink >= 0.99 * ink.amax(dim=(1, 2), keepdim=True)).float()
    middles = []
    for dim in (1, 2):
        places = torch.arange(ink.shape[dim]).float()
        weights = near.amax(dim=3 - dim)
        middles.append(((weights * places).sum(dim=1) / weights.sum(dim=1)).round().long())
    return windows[torch.arange(len(frames)), middles[0], middles[1]]
