"""Draw noise, times and drop-out masks that are equal on all ranks of a context group.

Row i of each result depends only on (seed, step, first_index + i): not on the number of ranks, the device or earlier
draws. Values are drawn on the CPU for the whole sequence; the wrapped model shards them with its input.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_cp.data import RandomStream, keyed_generator

DeviceLike = torch.device | str | None


def sample_noise(
    shape: Sequence[int],
    *,
    seed: int,
    step: int,
    first_index: int = 0,
    stream: int = RandomStream.NOISE,
    device: DeviceLike = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw standard normal noise, one keyed draw per row (sample).

    Args:
        shape: shape of this data rank's share of the batch, batch dim first.
        seed: seed of the run.
        step: training step.
        first_index: global batch index of the first row (`GlobalBatchSampler.first_index`).
        stream: random stream, if a step needs several independent draws.
        device: device of the result.
        dtype: dtype of the result; values are drawn in float32.

    >>> whole = sample_noise((4, 3), seed=0, step=7)
    >>> torch.equal(whole[2:], sample_noise((2, 3), seed=0, step=7, first_index=2))
    True
    """
    rows = np.empty(tuple(shape), dtype=np.float32)
    for row in range(rows.shape[0]):
        generator = keyed_generator(seed, stream, step=step, index=first_index + row)
        rows[row] = generator.standard_normal(rows.shape[1:], dtype=np.float32)
    return torch.from_numpy(rows).to(device=device, dtype=dtype)


def sample_uniform(
    rows: int, *, seed: int, step: int, first_index: int = 0, stream: int, device: DeviceLike = None
) -> Tensor:
    """Draw one uniform number in [0, 1) per row, float32 [rows]. Arguments: see `sample_noise`."""
    drawn = [keyed_generator(seed, stream, step=step, index=first_index + row).random() for row in range(rows)]
    return torch.tensor(drawn, dtype=torch.float32, device=device)


def sample_times(rows: int, *, seed: int, step: int, first_index: int = 0, device: DeviceLike = None) -> Tensor:
    """Draw flow-matching times in (0, 1), logit-normal (Esser et al., arXiv:2403.03206), [rows]."""
    normal = sample_noise(
        (rows,), seed=seed, step=step, first_index=first_index, stream=RandomStream.TIME, device=device
    )
    return torch.sigmoid(normal)


def sample_dropped(
    rows: int, probability: float, *, seed: int, step: int, first_index: int = 0, device: DeviceLike = None
) -> Tensor:
    """Select the rows that train without their condition, for classifier-free guidance (CFG); bool [rows]."""
    drawn = sample_uniform(rows, seed=seed, step=step, first_index=first_index, stream=RandomStream.DROP, device=device)
    return drawn < probability
