"""How many sampled digits a classifier of real digits recognises."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cp.data.digits import DIGIT_SIZE, load_scans


@dataclass(frozen=True)
class Recognition:
    """What the classifier read, [n], and the fraction that is what was asked for."""

    read: Tensor
    fraction: float


def recognise_digits(samples: Tensor, labels: Tensor) -> Recognition:
    """Reads samples with a support vector classifier fitted to all real scans.

    Args:
        samples: [n, 1, frames, height, width] in about [-1, 1]; of a clip, the middle frame's inkiest 8 × 8 window is
            read.
        labels: what was asked for, [n].
    """
    from sklearn.svm import SVC

    scans = load_scans()
    classifier = SVC(gamma=0.001 * 64, C=10.0)  # scikit-learn's own example, in our units (1/8 of theirs)
    classifier.fit(scans.pixels.flatten(1).numpy(), scans.labels.numpy())
    frames = samples[:, 0, samples.shape[2] // 2].float().cpu().clamp(-1, 1)
    read = torch.from_numpy(classifier.predict(inkiest_windows(frames).flatten(1).numpy()))
    return Recognition(read=read, fraction=float((read == labels.cpu()).float().mean()))


def inkiest_windows(frames: Tensor, size: int = DIGIT_SIZE) -> Tensor:
    """The size × size window with the most ink of each frame: [n, h, w] -> [n, size, size]."""
    windows = frames.unfold(1, size, 1).unfold(2, size, 1)  # [n, rows, cols, size, size]
    best = windows.sum(dim=(3, 4)).flatten(1).argmax(dim=1)
    return windows.flatten(1, 2)[torch.arange(len(frames)), best]
