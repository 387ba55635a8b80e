import pickle
import random

import numpy as np
import torch

from lightning_cp.data import RandomStream, keyed_generator, worker_init_fn


def drawn_after(seed: int, data_rank: int, worker: int) -> tuple[float, float, float]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        pickle.loads(pickle.dumps(worker_init_fn(seed, data_rank)))(worker)
        return random.random(), float(np.random.rand()), float(torch.rand(()))
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def test_a_worker_is_seeded_by_seed_data_rank_and_worker_alone() -> None:
    assert drawn_after(0, 1, 2) == drawn_after(0, 1, 2)
    places = [(seed, rank, worker) for seed in (0, 1) for rank in (0, 1) for worker in (0, 1)]
    for source in range(3):
        assert len({drawn_after(*place)[source] for place in places}) == len(places)


def test_streams_steps_and_indices_are_independent() -> None:
    keys = [(s, t, i) for s in RandomStream for t in (0, 1, 1 << 40) for i in (0, 1, 1 << 40)]
    drawn = {keyed_generator(0, s, step=t, index=i).random() for s, t, i in keys}
    assert len(drawn) == len(keys)
    long = keyed_generator(0, RandomStream.NOISE, index=0).random(100_000)
    assert keyed_generator(0, RandomStream.NOISE, index=1).random() not in long
