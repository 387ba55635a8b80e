"""Run bench=gpu: the stages one after another, each by pytest in a process of its own, and write the page.

A crash of one measurement (for instance an illegal memory access) does not affect the next one: the stage continues in
a new process. An interrupted run continues with the first measurement without a result.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.checkpoint.folder import temporary_folder
from lightning_cp.files import no_link, writing_new
from lightning_cp.launch import Machine
from lightning_cp.recipes.benchmarks.gpu.page import errors_of, write_page
from lightning_cp.recipes.benchmarks.gpu.results import CUT_OFF, Result, Results, read_results, write_results

REPOSITORY = Path(__file__).resolve().parents[3]
STAGES = ["tests", "errors", "merge", "one_rank", "memory", "sparse", "host", "transformer", "long_context", "main_job"]
MEASUREMENTS = str(Path(__file__).with_name("measurements.py"))
_MIN_STAGE_S = 60.0  # a stage is not started with less time left
_FAILED, _ENDS = 1, (0, 5)  # exit codes of pytest: something failed; all passed, or nothing is left to run


def check_settings(config: DictConfig) -> str:
    """Check the settings. Returns: what is wrong; "" if nothing is."""
    if not config.stages or any(name not in STAGES for name in config.stages):
        return f"stages={list(config.stages)} is not valid: must be some of {', '.join(STAGES)}"
    if config.device not in ("cpu", "cuda"):
        return f"device={config.device} is not valid: must be cpu or cuda"
    for name in ("stage_s", "total_s"):
        if not isinstance(config[name], (int, float)) or not config[name] > 0:
            return f"{name}={config[name]}: must be a number of seconds above 0"
    if config.device == "cuda" and not Machine.this().gpus:
        return "device=cuda needs a GPU, but there is none here; bench=gpu_on_cpu runs the same stages on CPU"
    return "" if importlib.util.find_spec("pytest") else "the stages run in pytest, which is not installed"


def run(config: DictConfig, folder: Path) -> None:
    """Run the stages that have no result in `folder`, and write the page.

    Exits with 1 if a goal is missed, a measurement failed, or a stage was not started.
    """
    results = run_stages(config, folder)
    page = write_page(results, config.stages, folder, device=config.device)
    print(page)
    if config.page is not None:
        copy = Path(config.page)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with writing_new(copy):
            copy.write_bytes(page.read_bytes())
    found = [result for items in results.values() for result in items.values()]
    missed = [check for result in found for check in result.checks if check.passed is False]
    not_run = [name for name in config.stages if name not in results]
    for check in missed:
        print(f"goal missed: {check.name}: {check.value}, goal {check.goal}")
    if not_run:
        print(f"not run: {', '.join(not_run)}; to run them, use hydra.run.dir={folder} again")
    if missed or not_run or any(result.error for result in found):
        sys.exit(1)


def run_stages(config: DictConfig, folder: Path) -> Results:
    """Run what has no result in `folder/results.json` yet, which is written after each measurement.

    A stage ends after `config.stage_s`, or earlier if `config.total_s` is used up.

    Returns: the results, in the order of `config.stages`; a stage that was not started is missing.
    """
    path, started, results = folder / "results.json", time.monotonic(), Results()
    for name in config.stages:
        stored, digest = read_results(path), _digest(config, name)
        earlier = {item: x for item, x in stored.get(name, {}).items() if x.settings == digest}
        limit_s = min(config.stage_s, config.total_s - (time.monotonic() - started))
        if limit_s < min(config.stage_s, _MIN_STAGE_S):
            print(f"{name}: not started, {limit_s:.0f} s are left")
            results |= {name: earlier} if earlier else {}
            continue
        stored[name] = {item: x for item, x in earlier.items() if not x.error}
        if stored[name]:
            print(f"{name}: continues after {len(stored[name])} measurements of an earlier run")
        write_results(stored, path)
        _run_stage(name, config, digest, path, limit_s)
        results[name] = read_results(path)[name]
        seconds = sum(x.seconds for x in results[name].values())
        print(f"{name}: {errors_of(results[name]) or 'done'}, {seconds:.0f} s", flush=True)
    return results


def _digest(config: DictConfig, name: str) -> str:
    """Return a digest of what a stage's results depend on: its settings, the device and torch."""
    import torch

    used: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, ["device", "attention", name]))
    device = torch.cuda.get_device_name(0) if config.device == "cuda" else "cpu"
    return hashlib.sha256(json.dumps([used, device, torch.__version__]).encode()).hexdigest()[:16]


def _run_stage(name: str, config: DictConfig, digest: str, path: Path, limit_s: float) -> None:
    """Run a stage in as many processes as it needs. A measurement that ends its process is recorded as failed."""
    deadline = time.monotonic() + limit_s
    with temporary_folder() as scratch:
        settings = scratch / "settings.yaml"
        OmegaConf.save(config, settings, resolve=True)
        command = [sys.executable, "-m", "pytest", "-x", "-s", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
        command += ["-p", f"{__package__}.plugin", f"--stage={name}", f"--digest={digest}"]
        command += [f"--settings={settings}", f"--results={path}"]
        is_tests = name == "tests"
        command += ["-m", "full or not full", *config.tests.files] if is_tests else ["-W", "ignore", MEASUREMENTS]
        code, count = _FAILED, -1
        while code == _FAILED or (code not in _ENDS and len(read_results(path)[name]) > count):
            count = len(read_results(path)[name])
            code, reason = _run_process(command, path.with_name("log.txt"), deadline - time.monotonic())
            stored = read_results(path)
            running = [x for x in stored[name].values() if x.error == CUT_OFF]
            if code not in (*_ENDS, _FAILED) and not running:  # before the first measurement
                running = [stored[name].setdefault("pytest", Result(settings=digest))]
            for result in running:
                result.error = reason
            write_results(stored, path)


def _run_process(command: list[str], log: Path, limit_s: float) -> tuple[int, str]:
    """Run a command, and end it with all its children after `limit_s`.

    Returns: the exit code, and the reason of a failure, with the end of the output.
    """
    with open(log, "ab", opener=no_link) as file:
        start = file.tell()
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,  # the process ends when this one does, which closes the pipe
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            code = process.wait(max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            return _ENDS[0], f"ended after its limit of {limit_s:.0f} s; the next run continues from there"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    with open(log, "rb") as written:
        written.seek(max(start, log.stat().st_size - 4000))
        lines = [line.strip() for line in written.read().decode(errors="replace").splitlines() if line.strip()]
    reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return code, "; ".join([reason, *lines[-6:]])[:1000]
