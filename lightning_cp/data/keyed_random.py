"""Draw random numbers that depend only on a key: not on state, call order or device.

Each draw is a Philox stream (Salmon et al., SC 2011). Its key is the seed and the stream number, its counter the step
and the sample index. A rank with samples 4 to 7 of a batch therefore draws the same numbers for them as one process.
"""

import hashlib
from enum import IntEnum, unique

import numpy as np

_WORD = (1 << 64) - 1


@unique
class RandomStream(IntEnum):
    """Stream numbers, one per purpose. Streams of one seed never overlap."""

    ORDER = 1
    NOISE = 2
    TIME = 3
    DROP = 4
    CLIP = 5
    WORKER = 6
    SAMPLE = 7
    POSTERIOR = 8
    CAPTION = 9
    BATCHES = 10
    EXPERT = 11
    IMAGE_NOISE = 12
    ROLLOUT = 13


def keyed_generator(seed: int, stream: int, *, step: int = 0, index: int = 0) -> np.random.Generator:
    """Create a generator at the start of the stream (seed, stream, step, index).

    Args:
        seed: seed of the run, modulo 2^64.
        stream: a `RandomStream`, or a custom number of at least 1000.
        step: training step, epoch or another counter.
        index: sample index in the global batch or in the data set.
    """
    key = np.array([seed & _WORD, int(stream) & _WORD], dtype=np.uint64)
    counter = np.array([0, 0, index & _WORD, step & _WORD], dtype=np.uint64)  # the low word counts the blocks drawn
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def hashed_seed(key: str) -> int:
    """Return a seed for torch's generators that depends on a text only, from 0 to 2^63 - 1."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
