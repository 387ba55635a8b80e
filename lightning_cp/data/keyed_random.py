"""Random numbers that depend on a key alone: no state, no order of calls, no device.

Each draw is a Philox stream (Salmon et al., SC 2011) keyed by the seed and by what the draw is for, and counted by the
step and the index of the sample. So a rank that holds rows 4 to 7 of a batch draws what one process draws for them.
"""

from enum import IntEnum, unique

import numpy as np

_WORD = (1 << 64) - 1


@unique
class RandomStream(IntEnum):
    """What a draw is for. Two streams of one seed never share a number."""

    ORDER = 1
    NOISE = 2
    TIME = 3
    DROP = 4
    CLIP = 5
    WORKER = 6
    SAMPLE = 7


def keyed_generator(seed: int, stream: int, *, step: int = 0, index: int = 0) -> np.random.Generator:
    """A generator at the start of the stream named by (seed, stream, step, index).

    Args:
        seed: of the run; taken modulo 2^64.
        stream: one of `RandomStream`, or a number of the caller's own from 1000 on.
        step: of training, or the epoch, or whatever counts in the caller's time.
        index: of the sample in the global batch or in the data set.
    """
    key = np.array([seed & _WORD, int(stream) & _WORD], dtype=np.uint64)
    counter = np.array([0, 0, index & _WORD, step & _WORD], dtype=np.uint64)  # the low word counts the blocks drawn
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
