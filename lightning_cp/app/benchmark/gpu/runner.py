"""Run the stages one after another, each in a process of its own, and keep what was measured.

A crash of one measurement (an illegal memory access, say) does not reach the next one: the stage goes on in a new
process. A run that is cut off, anywhere, goes on with the first measurement that has no result.
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

from lightning_cp.app.benchmark.gpu.log import LogWriter
from lightning_cp.app.benchmark.gpu.results import CUT_OFF, StageResult, read_results, write_results

_TAIL_LINES = 6  # of a failed process's output, in the stage's error
_LEAST_S = 60.0  # a stage is not started for less


def run_stages(config: DictConfig, folder: Path, report: Callable[[str], None]) -> dict[str, StageResult]:
    """Run the stages that are not complete in `folder/results.json`, which is written after each measurement.

    A stage ends after `config.stage_s`, or earlier if `config.total_s` is used up.

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
        if kept is not None and kept.settings != settings:
            kept = None
        if kept is not None and not kept.error:
            results[name] = kept
            report(f"{name}: kept from an earlier run")
            continue
        limit_s = min(config.stage_s, config.total_s - (time.monotonic() - began))
        if limit_s < min(config.stage_s, _LEAST_S):
            report(f"{name}: not started, {limit_s:.0f} s are left")
            if kept is not None:
                results[name] = kept
            continue
        stored[name] = kept or StageResult(settings)
        if stored[name].finished:
            report(f"{name}: goes on after {len(stored[name].finished)} measurements of an earlier run")
        _run_stage(name, config, stored, path, limit_s)
        results[name] = stored[name]
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


def stage_command(name: str, settings: Path, results: Path) -> list[str]:
    """The command that runs the rest of a stage."""
    return [sys.executable, "-m", "lightning_cp.app.benchmark.gpu.stage", name, str(settings), str(results)]


def _run_stage(name: str, config: DictConfig, stored: dict[str, StageResult], path: Path, limit_s: float) -> None:
    """Run a stage in as many processes as it needs, and replace `stored[name]` by its result.

    A measurement that ends its process is noted as failed, and the next process goes on after it.
    """
    began, spent_s = time.monotonic(), stored[name].seconds
    stored[name].failed, stored[name].error = {}, CUT_OFF  # the error stays if this process is killed
    with tempfile.TemporaryDirectory(prefix="lightning_cp_") as scratch:
        given = Path(scratch) / "settings.yaml"
        OmegaConf.save(config, given, resolve=True)
        command = stage_command(name, given, path)
        while True:
            stored[name].started = ""
            write_results(stored, path)
            left_s = limit_s - (time.monotonic() - began)
            error, timed_out = _run_process(command, path.with_name("log.txt"), name, left_s)
            stored[name] = read_results(path)[name]
            if not error or timed_out or not stored[name].started:
                break
            stored[name].failed[stored[name].started] = error
    result = stored[name]
    crashes = [f"{measurement}: {why}" for measurement, why in result.failed.items()]
    result.error = "; ".join(crashes + ([error] if error else []))[:2000]
    result.started, result.seconds = "", spent_s + time.monotonic() - began
    write_results(stored, path)


def _run_process(command: Sequence[str], log: Path, name: str, limit_s: float) -> tuple[str, bool]:
    """Run a command, and end it with all its children after `limit_s`.

    Returns: what went wrong, with the end of its output; "" if nothing did. Whether it was ended after its limit.
    """
    with log.open("a", encoding="utf-8") as file:
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
        return f"ended after its limit of {limit_s:.0f} s; the next run goes on from there", True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdin.close()
        output = writer.finish()
    if not code:
        return "", False
    said = [line.strip() for line in output.splitlines() if line.strip()][-_TAIL_LINES:]
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "; ".join([how, *said])[:1000], False
