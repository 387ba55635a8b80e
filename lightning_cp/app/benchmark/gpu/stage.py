"""Run one stage in this process: `python -m lightning_cp.app.benchmark.gpu.stage NAME SETTINGS.yaml FOLDER`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.benchmark.gpu import attention, subprocesses
from lightning_cp.app.benchmark.gpu.results import StageResult, write_results

STAGES = {
    "tests": subprocesses.run_tests,
    "errors": attention.kernel_errors,
    "merge": attention.merge_bandwidth,
    "one_rank": attention.one_rank_times,
    "memory": attention.peak_memory,
    "main_job": subprocesses.run_main_job,
}


def main(name: str, settings: str, folder: str) -> None:
    """Run the stage, which writes `folder/results.json` after each part, so that a timeout loses little."""
    config = OmegaConf.load(settings)
    assert isinstance(config, DictConfig), "the runner wrote a mapping"
    warnings.filterwarnings("ignore", category=FutureWarning)
    result = StageResult({})

    def save() -> None:
        write_results({name: result}, Path(folder) / "results.json")

    STAGES[name](config, result, save)
    save()


if __name__ == "__main__":
    main(*sys.argv[1:])
