"""Random states are restored, also for another number of data groups."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch

from lightning_cp.data import RandomStream, keyed_generator, worker_init_fn
from lightning_cp.data.random_state import (
    RandomStates,
    get_random_state,
    is_same_state,
    random_states,
    restore_random_states,
    set_random_state,
)


def _draw() -> tuple[Any, ...]:
    return (*torch.rand(2).tolist(), np.random.random(), np.random.standard_normal(), random.random(), random.gauss())


def _seeded(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return get_random_state()


def test_every_generator_is_restored() -> None:
    _seeded(3)
    _draw()
    state = get_random_state()
    first = _draw()
    assert not is_same_state(state, get_random_state())
    set_random_state(state)
    assert is_same_state(state, get_random_state())
    assert _draw() == first


def test_as_many_groups_get_their_own_states() -> None:
    states = [_seeded(seed) for seed in (1, 2)]
    for group in range(2):
        restore_random_states(states, group, 2)
        assert is_same_state(get_random_state(), states[group])


def test_of_equal_states_the_first_group_keeps_one_and_the_others_get_new_ones() -> None:
    states = [_seeded(1), _seeded(1)]
    restored = []
    for group in range(3):
        restore_random_states(states, group, 3)
        restored.append(get_random_state())
    assert is_same_state(restored[0], states[0])
    assert not any(is_same_state(a, b) for i, a in enumerate(restored) for b in [*restored[:i], *states[1 : 2 * i]])


def test_another_number_of_groups_draws_other_numbers_reproducibly() -> None:
    states = [_seeded(seed) for seed in (1, 2)]
    drawn = []
    for group in (0, 1, 2, 0):
        _seeded(77)
        restore_random_states(states, group, 3)
        drawn.append(_draw())
    for state in states:
        set_random_state(state)
        drawn.append(_draw())
    assert drawn[0] == drawn[3]
    kinds = [set(values) for values in zip(*(drawn[:3] + drawn[4:]), strict=True)]
    assert all(len(values) == 5 for values in kinds)


def test_nothing_saved_restores_nothing() -> None:
    before = _seeded(4)
    restore_random_states([], 0, 1)
    assert is_same_state(get_random_state(), before)


def test_one_process_saves_and_loads_its_own() -> None:
    before = _seeded(5)
    assert len(random_states(0, 1)) == 1
    saved = RandomStates(0, 1).state_dict()
    _draw()
    RandomStates(0, 1).load_state_dict(saved)
    assert is_same_state(get_random_state(), before)


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
