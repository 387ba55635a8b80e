"""Run the stages one after another, each in a separate process, and store each measurement.

A crash of one measurement (for instance an illegal memory access) does not affect the next one: the stage continues in
a new process. An interrupted run continues with the first measurement without a result.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.benchmark.gpu.log import LogWriter
from lightning_cp.app.benchmark.gpu.results import CUT_OFF, StageResult, read_results, write_results
from lightning_cp.checkpoint.folder import temporary_folder
from lightning_cp.files import no_link

_TAIL_LINES = 6  # last lines of a failed process's output, added to the stage's error
_MIN_STAGE_S = 60.0  # a stage is not started with less time left


def run_stages(config: DictConfig, folder: Path, report: Callable[[str], None]) -> dict[str, StageResult]:
    """Run the stages that are not complete in `folder/results.json`, which is written after each measurement.

    A stage ends after `config.stage_s`, or earlier if `config.total_s` is used up.

    Args:
        config: the settings of `conf/bench/bench/gpu.yaml`.
        report: called with one line for each stage.
    Returns: the results by stage, in the order of `config.stages`; a stage that was not started is missing.
    Raises: ValueError: `folder/results.json` is not a results file.
    """
    path, started = folder / "results.json", time.monotonic()
    stored = read_results(path)
    results: dict[str, StageResult] = {}
    for name in config.stages:
        settings = stage_settings(config, name)
        earlier = stored.get(name)
        if earlier is not None and earlier.settings != settings:
            earlier = None
        if earlier is not None and not earlier.error:
            results[name] = earlier
            report(f"{name}: result of an earlier run")
            continue
        limit_s = min(config.stage_s, config.total_s - (time.monotonic() - started))
        if limit_s < min(config.stage_s, _MIN_STAGE_S):
            report(f"{name}: not started, {limit_s:.0f} s are left")
            if earlier is not None:
                results[name] = earlier
            continue
        stored[name] = earlier or StageResult(settings)
        if stored[name].finished:
            report(f"{name}: continues after {len(stored[name].finished)} measurements of an earlier run")
        _run_stage(name, config, stored, path, limit_s)
        results[name] = stored[name]
        report(f"{name}: {results[name].error or 'done'}, {results[name].seconds:.0f} s")
    return results


def stage_settings(config: DictConfig, name: str) -> dict[str, Any]:
    """Return what a stage's result depends on: its settings, the device and the library versions."""
    import torch

    on_gpu = config.device == "cuda" and torch.cuda.is_available()
    used: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, ["device", "attention", "model", name]))
    return {
        **used,
        "device_name": torch.cuda.get_device_name(0) if on_gpu else config.device,
        "torch": torch.__version__,
    }


def stage_command(name: str, settings: Path, results: Path) -> list[str]:
    """Return the command that runs the rest of a stage."""
    return [sys.executable, "-m", "lightning_cp.app.benchmark.gpu.stage", name, str(settings), str(results)]


def _run_stage(name: str, config: DictConfig, stored: dict[str, StageResult], path: Path, limit_s: float) -> None:
    """Run a stage in as many processes as it needs, and replace `stored[name]` by its result.

    A measurement that ends its process is recorded as failed; the next process continues after it.
    """
    started, spent_s = time.monotonic(), stored[name].seconds
    stored[name].failed, stored[name].error = {}, CUT_OFF  # the error stays if this process is killed
    with temporary_folder() as scratch:
        settings_file = scratch / "settings.yaml"
        OmegaConf.save(config, settings_file, resolve=True)
        command = stage_command(name, settings_file, path)
        while True:
            stored[name].started = ""
            write_results(stored, path)
            left_s = limit_s - (time.monotonic() - started)
            error, timed_out = _run_process(command, path.with_name("log.txt"), name, left_s)
            stored[name] = read_results(path)[name]
            if not error or timed_out or not stored[name].started:
                break
            stored[name].failed[stored[name].started] = error
    result = stored[name]
    crashes = [f"{measurement}: {why}" for measurement, why in result.failed.items()]
    result.error = "; ".join(crashes + ([error] if error else []))[:2000]
    result.started, result.seconds = "", spent_s + time.monotonic() - started
    write_results(stored, path)


def _run_process(command: Sequence[str], log: Path, name: str, limit_s: float) -> tuple[str, bool]:
    """Run a command, and end it with all its children after `limit_s`.

    Returns: the error with the end of the output ("" if there is none), and True if the limit was exceeded.
    """
    with open(log, "a", encoding="utf-8", opener=no_link) as file:
        file.write(f"\n== {name}\n")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.PIPE,  # the process ends when this one does, which closes the pipe
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    writer = LogWriter(process.stdout, log)
    try:
        code = process.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        return f"ended after its limit of {limit_s:.0f} s; the next run continues from there", True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdin.close()
        output = writer.finish()
    if not code:
        return "", False
    last_lines = [line.strip() for line in output.splitlines() if line.strip()][-_TAIL_LINES:]
    reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "; ".join([reason, *last_lines])[:1000], False
