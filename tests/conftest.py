"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tensors are tiny here, and a second thread only waits actively: in this process, in its ranks and in programs.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pandas, which scikit-learn imports
# Torch's TCP stores look up the name of each address that connects, by default for 5 s if no answer comes.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from tests import features
from tests.harness import RankPool, warm
from tests.harness.leaks import left_behind, surroundings
from tests.harness.strict import Strict
from tests.harness.strict.left_out import LEFT_OUT


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options that run all ranks of `run_ranks` on a stand-in for NCCL (`tests/harness/strict`)."""
    parser.addoption("--strict-comm", action="store_true", help="run ranks on a strict stand-in for NCCL")
    parser.addoption("--strict-serial", action="store_true", help="the same, one operation of a rank at a time")


def _is_strict(config: pytest.Config) -> bool:
    return bool(config.getoption("--strict-comm") or config.getoption("--strict-serial"))


@pytest.fixture(scope="session")
def run_ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """run_ranks(world, function, *args, timeout_s=180, init=True, strict=None) -> results of all ranks.

    Args: strict: True, or settings, to run on a stand-in for NCCL; None: as the options of pytest say.
    """
    pool = RankPool(Strict(serial=pytestconfig.getoption("--strict-serial")) if _is_strict(pytestconfig) else False)
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _warm_server_ends() -> Iterator[None]:
    yield
    warm.close()


@pytest.fixture(scope="module", autouse=True)
def _collections_pass_over_imported_modules() -> None:
    """Freeze what is there before a module's tests: with all that is imported here, a collection takes 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = surroundings()
    yield
    leaks = left_behind(before)
    if leaks:
        pytest.fail(f"the test left behind: {'; '.join(leaks)}", pytrace=False)


@pytest.hookimpl(tryfirst=True)  # before that of pytest-xdist, which reads these options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the default suite in three processes on two cores or more. `pytest -n 0` runs it in one.

    Ranks often wait for each other, and tests for processes: of two processes, cores would be idle a third of the time.
    """
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or option.numprocesses is not None:
        return
    chosen = option.markexpr or option.keyword or option.collectonly or option.usepdb or option.dist != "no"
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    writes_report = any(name.startswith("LIGHTNING_CP_") for name in os.environ)  # from what one process has found
    is_suite = [Path(arg) for arg in config.args] == [Path(path) for path in config.getini("testpaths")]
    if chosen or is_worker or writes_report or not is_suite:
        return
    option.numprocesses = min(3, 2 * len(os.sched_getaffinity(0)) - 1)
    option.dist, option.loadscopereorder = (
        "loadfile",
        False,
    )  # fixtures of a module are made once; short files come last


def _further_cases(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that the marker `default` of a test leaves out. It has their number, or parts of their ids."""
    counts = Counter[tuple[Path, str]]()
    for item in items:
        marker = item.get_closest_marker("default")
        if marker is None or item.get_closest_marker("full"):
            continue
        test, case = item.name.split("[", 1)
        counts[item.path, test] += 1
        by_number = isinstance(marker.args[0], int)
        if (by_number and counts[item.path, test] > marker.args[0]) or (
            not by_number and not any(part in case for part in marker.args)
        ):
            yield item


@pytest.hookimpl(tryfirst=True)  # before that of pytest, which reads the marker `full`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `full` unless a marker expression, or the name of a test, asks for them.

    On the stand-in for NCCL, skip those that cannot run on it.
    """
    for item in items if _is_strict(config) else ():
        for reason in (why for start, why in LEFT_OUT.items() if item.nodeid.startswith(start)):
            item.add_marker(pytest.mark.skip(reason))
    for item in _further_cases(items):
        item.add_marker(pytest.mark.full)
    if "full" in (config.getoption("-m") or "") or any("::" in arg for arg in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_sessionfinish() -> None:
    """Write the rows of docs/sampling.md that this run found, if it is asked to."""
    if features.VARIABLE in os.environ:
        features.write_rows(Path(os.environ[features.VARIABLE]))
