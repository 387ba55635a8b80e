"""Run a function of a benchmark on ranks of this machine, and check the settings of ranks."""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from lightning_cp.launch import LocalLauncher, Machine
from lightning_cp.launch.rank import Target
from lightning_cp.recipes.benchmarks.links import SlowLinks
from lightning_cp.recipes.benchmarks.report import Row, count_ranks
from lightning_cp.recipes.runs.ranks import run_on_ranks


def check_device(config: DictConfig, ranks: int) -> str:
    """Check the setting `device`. Returns: what is wrong; "" if nothing is."""
    if config.device not in ("cpu", "cuda"):
        return f"device={config.device} is not valid: must be cpu or cuda"
    gpus = Machine.this().gpus
    if config.device == "cuda" and ranks > gpus:
        return f"device=cuda: {count_ranks(ranks)}, but there are {gpus} GPUs here; use fewer ranks, or device=cpu"
    return ""


def check_integers(config: DictConfig, **minimum: int) -> str:
    """Check settings that are lists of integers. Args: minimum: their least values, by name with __ for a dot."""
    for key, least in minimum.items():
        name = key.replace("__", ".")
        values = OmegaConf.select(config, name)
        if not values or not all(isinstance(x, int) and x >= least for x in values):
            return f"{name}={list(values or [])}: must be integers of at least {least}"
    return ""


def rows_on_ranks(function: Target, config: DictConfig, ranks: int, folder: Path, **values: Any) -> list[Row]:
    """Run a function on all ranks. Returns: the rows that it yields. Exits if a rank fails.

    Args:
        function: see `on_ranks`.
        values: settings that it gets in addition to `config` and the run folder.
    """
    os.environ["KINETO_LOG_LEVEL"] = "6"  # of the ranks: the profiler is silent
    settings: Any = OmegaConf.to_container(config, resolve=True)
    threads = 1 if config.device == "cpu" else 0
    settings |= {"folder": str(folder), **values}
    link = config.get("link_mbit")
    launcher = LocalLauncher if link is None else partial(SlowLinks, link)
    rows, result = run_on_ranks(function, settings, ranks, limit_s=config.limit_s, threads=threads, launcher=launcher)
    if result.failure is not None:
        print(f"error: {result.failure.describe()}", file=sys.stderr)
        sys.exit(result.exit_code)
    return rows


def device_of(config: DictConfig) -> torch.device:
    """Return this rank's device. Warnings of other packages are ignored from now on."""
    import diffusers

    warnings.filterwarnings("ignore")
    diffusers.logging.set_verbosity_error()
    return torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
