"""The measurements of one GPU by stage, as parameters of a test. conf/bench/bench/gpu.yaml has their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from lightning_cp.recipes.benchmarks.gpu import errors, host, main_job, memory, sparse, speed, transformer
from lightning_cp.recipes.benchmarks.gpu.results import Measurement, Result

STAGES: dict[str, Callable[[DictConfig], Iterator[Measurement]]] = {
    "errors": errors.kernel_errors,
    "merge": speed.merge_bandwidth,
    "one_rank": speed.one_rank_times,
    "memory": memory.peak_memory,
    "sparse": sparse.sparse_times,
    "host": host.host_times,
    "transformer": transformer.transformer_times,
    "long_context": speed.long_contexts,
    "main_job": main_job.train_on_one_gpu,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the measurements of the stage the parameters of the test."""
    settings: Any = OmegaConf.load(metafunc.config.getoption("settings"))
    names, functions = zip(*STAGES[metafunc.config.getoption("stage")](settings), strict=True)
    metafunc.parametrize("measure", functions, ids=names)


def test_measurement(measure: Callable[[Result], None], result: Result) -> None:
    """Measure. A missed goal is no failure: the page reports it."""
    measure(result)
