"""A pytest plugin that stores what each test or measurement reports, and leaves out those that have a result.

`run.py` starts pytest with it as often as a stage needs: a crash ends the process, and with -x a failure does, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_cp.launch.channel import end_with_launcher
from lightning_cp.recipes.benchmarks.gpu.results import CUT_OFF, Check, Result, read_results, write_results

_RESULT = pytest.StashKey[Result]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the runner."""
    parser.addoption("--stage", help="name of the stage")
    parser.addoption("--settings", help="YAML file of the settings")
    parser.addoption("--digest", help="digest of the settings that the results of the stage depend on")
    parser.addoption("--results", help="file of the results")


def pytest_configure(config: pytest.Config) -> None:
    """Store results. The process ends when the runner closes its stdin, which pytest -s leaves alone."""
    end_with_launcher(0)
    config.pluginmanager.register(_Recorder(config))


class _Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self._path, self._digest = Path(config.getoption("results")), config.getoption("digest")
        self._results = read_results(self._path)
        self._items = self._results.setdefault(config.getoption("stage"), {})

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if _name_of(item) not in self._items]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        started, values = time.monotonic(), {key: x for r in self._items.values() for key, x in r.values.items()}
        item.stash[_RESULT] = Result(values=values)
        self._store(item, Result(error=CUT_OFF))
        done: Any = yield
        self._store(item, item.stash[_RESULT], time.monotonic() - started)
        return done  # type: ignore[no-any-return]

    def _store(self, item: pytest.Item, result: Result, seconds: float = 0.0) -> None:
        result.seconds, result.settings = seconds, self._digest
        self._items[_name_of(item)] = result
        write_results(self._results, self._path)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        error = "" if call.excinfo is None else call.excinfo.exconly().strip()[:1000]
        name, result = _name_of(item), item.stash[_RESULT]
        if report.failed and name == item.nodeid:
            item.stash[_RESULT] = Result([Check(name, error.split("\n")[0][:200], "passes", False)])
        elif report.failed:
            item.stash[_RESULT] = Result(error=error)
        elif name == item.nodeid and (report.skipped or report.when == "call"):
            result.checks.append(Check(name, report.outcome, "passes", None if report.skipped else True))
        return report  # type: ignore[no-any-return]


def _name_of(item: pytest.Item) -> str:
    """Return the name of a measurement, or the id of a test."""
    return item.callspec.id if "measure" in getattr(item, "fixturenames", ()) else item.nodeid  # type: ignore[attr-defined]


@pytest.fixture
def result(request: pytest.FixtureRequest) -> Result:
    """What a measurement reports."""
    return request.node.stash[_RESULT]  # type: ignore[no-any-return]
