"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import features
from tests.harness import RankPool, warm
from tests.harness.leaks import left_behind, surroundings


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RankPool]:
    """run_ranks(world, function, *args, timeout_s=60, init=True) -> the results of function(rank, world, *args)."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _warm_server_ends() -> Iterator[None]:
    yield
    warm.close()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = surroundings()
    yield
    leaks = left_behind(before)
    if leaks:
        pytest.fail(f"the test left behind: {'; '.join(leaks)}", pytrace=False)


def pytest_configure() -> None:
    """Compute on one thread: tensors are tiny here, and a second thread would wait actively beside the ranks."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `full` unless a marker expression, or the name of a test, asks for them."""
    if "full" in (config.getoption("-m") or "") or any("::" in arg for arg in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_sessionfinish() -> None:
    """Write the rows of docs/sampling.md that this run found, if it is asked to."""
    if features.VARIABLE in os.environ:
        features.write_rows(Path(os.environ[features.VARIABLE]))
