"""Draw noise, times and drop-out masks that are equal on all ranks of a context group.

Each sample of a result depends only on (seed, step, its index in the global batch): not on the number of ranks, the
device or earlier draws. Values are drawn on the CPU for the whole sequence; the wrapped model shards them with its
input.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_cp.comm.background import Device, numbers_on, to_device
from lightning_cp.data import RandomStream, keyed_generator

FirstIndex = int | Sequence[int]  # global batch index of a batch's first sample, or of each of its samples


def indices_of(first_index: FirstIndex, count: int) -> Sequence[int]:
    """Return the global batch index of each of `count` samples."""
    return range(first_index, first_index + count) if isinstance(first_index, int) else first_index[:count]


def sample_noise(
    shape: Sequence[int],
    *,
    seed: int,
    step: int,
    first_index: FirstIndex = 0,
    stream: int = RandomStream.NOISE,
    device: Device = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw standard normal noise, one keyed draw per sample.

    Args:
        shape: shape of this data rank's share of the batch, batch dim first.
        seed: seed of the run.
        step: training step.
        first_index: global batch index of the first sample (`GlobalBatchSampler.first_index`), or of each sample.
        stream: random stream, if a step needs several independent draws.
        device: device of the result.
        dtype: dtype of the result; values are drawn in float32.

    >>> whole = sample_noise((4, 3), seed=0, step=7)
    >>> torch.equal(whole[2:], sample_noise((2, 3), seed=0, step=7, first_index=2))
    True
    """
    drawn = np.empty(tuple(shape), dtype=np.float32)
    for i, index in enumerate(indices_of(first_index, len(drawn))):
        generator = keyed_generator(seed, stream, step=step, index=index)
        drawn[i] = generator.standard_normal(drawn.shape[1:], dtype=np.float32)
    return to_device(torch.from_numpy(drawn).to(dtype), device)


def sample_uniform(
    count: int, *, seed: int, step: int, first_index: FirstIndex = 0, stream: int, device: Device = None
) -> Tensor:
    """Draw one uniform number in [0, 1) per sample, float32 [count]. Arguments: see `sample_noise`."""
    drawn = [keyed_generator(seed, stream, step=step, index=i).random() for i in indices_of(first_index, count)]
    return numbers_on(device, drawn, torch.float32)


def sample_times(count: int, *, seed: int, step: int, first_index: FirstIndex = 0, device: Device = None) -> Tensor:
    """Draw flow-matching times in (0, 1), logit-normal (Esser et al., arXiv:2403.03206), [count]."""
    normal = sample_noise(
        (count,), seed=seed, step=step, first_index=first_index, stream=RandomStream.TIME, device=device
    )
    return torch.sigmoid(normal)


def sample_dropped(
    count: int, probability: float, *, seed: int, step: int, first_index: FirstIndex = 0, device: Device = None
) -> Tensor:
    """Select the samples that train without their condition, for classifier-free guidance (CFG); bool [count]."""
    drawn = sample_uniform(
        count, seed=seed, step=step, first_index=first_index, stream=RandomStream.DROP, device=device
    )
    return drawn < probability
