"""Run real steps of layouts on the ranks of this machine, and return their times."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.settings.target import reads_settings
from lightning_cp.launch import Failure, Job, LocalLauncher
from lightning_cp.launch.scratch import temporary_folder
from lightning_cp.planning.step import Layout

_WARM_UPS = 2


@dataclass(frozen=True)
class Case:
    """Layouts of one request, which are measured in turn. Attributes: settings: settings of lightning-cp plan."""

    settings: DictConfig
    layouts: Sequence[Layout]


@dataclass(frozen=True)
class Measured:
    """What the ranks measured.

    Attributes:
        seconds: seconds of each repetition, by case and layout.
        device: figures of `calibrate`; None: not asked for.
    """

    seconds: list[list[list[float]]]
    device: dict[str, Any] | None = None


def run_on_ranks(
    cases: Sequence[Case], ranks: int, logs: Path, *, kind: str, repeats: int, limit_s: float, calibrates: bool = False
) -> Measured | Failure:
    """Start the ranks anew, and measure steps on them.

    Args:
        logs: folder for the output of the ranks.
        kind: "cpu" (one thread for each rank) or "cuda".
        repeats: number of repetitions, each of all layouts of a case.
        limit_s: time limit in seconds.
        calibrates: also measure the rates of the device, before each case, on the same ranks.
    Returns: the times; the failure of a rank, if one failed.
    """
    with temporary_folder() as scratch:
        result, settings = scratch / "result.json", scratch / "settings.yaml"
        asked = [{"settings": x.settings, "layouts": [asdict(layout) for layout in x.layouts]} for x in cases]
        values = {"device": kind, "cases": asked, "repeats": repeats, "calibrates": calibrates, "result": str(result)}
        OmegaConf.save(OmegaConf.create(values), settings)
        threads = 1 if kind == "cpu" else 0
        outcome = LocalLauncher(limit_s=limit_s).launch(
            Job(f"{__name__}:measure", settings, ranks, logs, threads=threads, environment={"KINETO_LOG_LEVEL": "6"})
        )
        if outcome.failure is not None:
            return outcome.failure
        return Measured(**json.loads(result.read_text(encoding="utf-8")))


@reads_settings
def measure(config: DictConfig) -> None:
    """Measure the cases on every rank; rank 0 writes the result."""
    import logging
    import warnings

    import diffusers
    import torch
    import torch.distributed as dist

    from lightning_cp.app.benchmark.calibrate import Calibration
    from lightning_cp.app.planning.real_step import build_step
    from lightning_cp.app.planning.settings import request_of
    from lightning_cp.launch.rendezvous import init_process_group
    from lightning_cp.planning.devices import as_figures

    warnings.filterwarnings("ignore")  # from other packages
    diffusers.logging.set_verbosity_error()
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    device = torch.device("cpu")
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    init_process_group("nccl" if device.type == "cuda" else "gloo")
    calibration = Calibration(device) if config.calibrates else None
    seconds = []
    for case in config.cases:
        if calibration is not None:  # before each case, because other load may change
            calibration.measure(config.repeats)
        request = request_of(case.settings)
        steps = [build_step(request, Layout(**layout), device) for layout in case.layouts]
        seconds.append(_time_in_turn(steps, device, config.repeats))
        del steps
        gc.collect()
    if dist.get_rank() == 0:
        figures = None if calibration is None else as_figures(calibration.result())
        result = {"seconds": seconds, "device": figures}
        Path(config.result).write_text(json.dumps(result) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def _time_in_turn(steps: Sequence[Callable[[], object]], device: Any, repeats: int) -> list[list[float]]:
    """Run each step in each round, so that other load disturbs all equally. Returns: seconds on the slowest rank."""
    import torch.distributed as dist

    from lightning_cp.app.benchmark.measure import max_over_ranks, synchronize

    times: list[list[float]] = [[] for _ in steps]
    for count in range(_WARM_UPS + repeats):
        for step, own in zip(steps, times, strict=True):
            synchronize(device)
            dist.barrier()
            started = time.perf_counter()
            step()
            synchronize(device)
            elapsed = max_over_ranks([time.perf_counter() - started])[0]
            if count >= _WARM_UPS:
                own.append(elapsed)
    return times
