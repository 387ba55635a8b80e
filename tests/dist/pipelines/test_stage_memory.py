"""PipeFusion with ever new sizes: what a rank keeps for each of them is bounded, and the results stay the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from lightning_cp.pipelines import parallel_pipeline, result_layout
from lightning_cp.pipelines.pipefusion import transfers as result_transfers
from lightning_cp.pipelines.pipefusion.transfers import ResultPieces
from tests.dist.compare import of_first_rank
from tests.dist.pipefusion import latents_of, make_pipe
from tests.harness import RankPool
from tests.pipelines.tiny import error_of

_MOST = 5
_SIZES = [(12, 20), (16, 20), (20, 12), (12, 20)]


def _new_sizes(rank: int, world: int) -> tuple[float, list[int], list[int], int]:
    """Largest error, the entries of each table and the sizes with positions after each call, new fake results."""
    alone, pipe = make_pipe("flux"), make_pipe("flux")
    parallelize_pipeline(alone, ContextParallelConfig(mesh=None), patches=world)
    parallelize_pipeline(pipe, ContextParallelConfig(), pipe=world, patches=world)
    state = parallel_pipeline(pipe)
    assert state is not None
    (calls,) = state.patch_runners.values()
    assert calls.results is not None
    assert calls.stage is not None
    results, links = calls.results, calls.stage.links
    errors, entries, positions, before = [], [0], [], len(FakeTensorMode.cache)
    with mock.patch.object(result_layout, "_MOST_SHAPES", _MOST), mock.patch.object(result_transfers, "_MOST_BYTES", 1):
        for height, width in _SIZES:
            expected = of_first_rank(lambda h=height, w=width: latents_of(alone, "flux", height=h, width=w))
            errors.append(error_of(expected, latents_of(pipe, "flux", height=height, width=width)))
            calls.begin()  # as the next call does
            tables: Any = (links.forms, links.sent_forms, results.transfers._forms)
            entries += [len(table) for table in tables]
            positions.append(len(results.transfers._pieces))
    return max(errors), entries, positions, len(FakeTensorMode.cache) - before


@pytest.mark.full
def test_new_sizes_do_not_fill_the_memory(run_ranks: RankPool) -> None:
    for error, entries, positions, fake in run_ranks(3, _new_sizes):
        assert error < 1e-12
        assert max(entries) == _MOST
        assert positions == [1] * len(_SIZES)
        assert fake == 0


def test_the_oldest_entries_are_forgotten() -> None:
    table: dict[Any, int] = {i: i for i in range(300)}
    result_layout.forget_oldest(table)
    assert list(table) == list(range(44, 300))
    result_layout.forget_oldest(table, 2)
    assert list(table) == [298, 299]
    result_layout.forget_oldest(table, 2)
    assert len(table) == 2


def test_the_positions_of_the_newest_sizes_fit_into_their_limit() -> None:
    transfers = result_transfers.ResultTransfers(mock.Mock(), [], mock.Mock())
    for i in range(6):
        transfers._forms[i] = mock.Mock()
        positions = [[torch.zeros(10, dtype=torch.int64)], [torch.zeros(5, dtype=torch.int64)]]  # 120 bytes
        transfers._pieces[i] = ResultPieces([], positions)
    with mock.patch.object(result_transfers, "_MOST_BYTES", 400):
        transfers.forget_oldest()
    assert list(transfers._pieces) == [3, 4, 5]
    with mock.patch.object(result_layout, "_MOST_SHAPES", 2):
        transfers.forget_oldest()
    assert list(transfers._pieces) == [4, 5]  # without their shapes, they are of no use
