"""Run the stages one after another, each in a process of its own, and keep the results of those that finished.

A crash of one stage (an illegal memory access, say) does not reach the next one, and a run that is cut off goes on with
the first stage that has no result.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.benchmark.gpu.results import StageResult, read_results, write_results

_TAIL_LINES = 6  # of a failed stage's output, in its error
_LIMIT = "ended after its limit"


def run_stages(config: DictConfig, folder: Path, report: Callable[[str], None]) -> dict[str, StageResult]:
    """Run the stages that have no result in `folder` yet, and write each result to `folder/results.json`.

    A stage is not started if its time limit exceeds what is left of `config.total_s`.

    Args:
        config: the settings of `conf/bench/bench/gpu.yaml`.
        report: called with one line for each stage.
    Returns: the results by stage, in the order of `config.stages`; a stage that was not started is missing.
    Raises: ValueError: `folder/results.json` holds something else.
    """
    path, began = folder / "results.json", time.monotonic()
    stored = read_results(path)
    results: dict[str, StageResult] = {}
    for name in config.stages:
        settings = stage_settings(config, name)
        kept = stored.get(name)
        if kept is not None and kept.settings == settings and not kept.error:
            results[name] = kept
            report(f"{name}: kept from an earlier run")
            continue
        left_s = config.total_s - (time.monotonic() - began)
        if left_s < config.stage_s:
            report(f"{name}: not started, {left_s:.0f} s are left and a stage may take {config.stage_s:.0f} s")
            continue
        results[name] = _run_stage(name, config, settings, folder)
        write_results({**stored, **results}, path)
        report(f"{name}: {results[name].error or 'done'}, {results[name].seconds:.0f} s")
    return results


def stage_settings(config: DictConfig, name: str) -> dict[str, Any]:
    """Everything a stage's result depends on: its settings, the device and the library versions."""
    import torch

    on_gpu = config.device == "cuda" and torch.cuda.is_available()
    used: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, ["device", "attention", "model", name]))
    return {
        **used,
        "device_name": torch.cuda.get_device_name(0) if on_gpu else config.device,
        "torch": torch.__version__,
    }


def _run_stage(name: str, config: DictConfig, settings: dict[str, Any], folder: Path) -> StageResult:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lightning_cp_") as scratch:
        given, log = Path(scratch) / "settings.yaml", folder / "log.txt"
        OmegaConf.save(config, given, resolve=True)
        command = [sys.executable, "-m", "lightning_cp.app.benchmark.gpu.stage", name, str(given), scratch]
        with log.open("a", encoding="utf-8") as output:
            output.write(f"\n== {name}\n")
            output.flush()
            start = output.tell()
            error = _wait(command, output, limit_s=config.stage_s)
        result = read_results(Path(scratch) / "results.json").get(name, StageResult({}))
        result.error = error
        if error and _LIMIT not in error:
            tail = log.read_bytes()[start:].decode(errors="replace").splitlines()[-_TAIL_LINES:]
            result.error = "; ".join([error, *(line.strip() for line in tail if line.strip())])[:2000]
    result.settings, result.seconds = settings, time.monotonic() - began
    return result


def _wait(command: Sequence[str], output: Any, *, limit_s: float) -> str:
    """Run a command and end it with all its children after `limit_s`. Returns: what went wrong; "" if nothing did."""
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"{_LIMIT} of {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""
