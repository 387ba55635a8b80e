"""Run one stage in this process: `python -m lightning_cp.app.benchmark.gpu.stage NAME SETTINGS.yaml RESULTS.json`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.benchmark.gpu import errors, host, main_job, memory, sparse, speed, suites, transformer
from lightning_cp.app.benchmark.gpu.results import Measurement, read_results, run_measurements, write_results
from lightning_cp.launch.channel import end_with_launcher

STAGES: dict[str, Callable[[DictConfig], Iterator[Measurement]]] = {
    "tests": suites.run_tests,
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


def main(name: str, settings: str, results: str) -> None:
    """Run the measurements of a stage that have no result in the results file yet, and save each there."""
    config, path = OmegaConf.load(settings), Path(results)
    assert isinstance(config, DictConfig), "the runner wrote a mapping"
    warnings.filterwarnings("ignore", category=FutureWarning)
    stored = read_results(path)
    run_measurements(STAGES[name](config), stored[name], lambda: write_results(stored, path))


if __name__ == "__main__":
    end_with_launcher(sys.stdin.fileno())
    main(*sys.argv[1:])
