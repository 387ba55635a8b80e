"""Run a function on ranks of this machine, and collect the rows that it yields."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_cp.checkpoint.folder import temporary_folder
from lightning_cp.config import ContextParallelConfig
from lightning_cp.launch import Job, LocalLauncher
from lightning_cp.launch.job import Launcher, Result
from lightning_cp.launch.rank import Target, target_of
from lightning_cp.launch.rendezvous import init_process_group

_ROWS = "rows.jsonl"


def on_ranks(function: Callable[[Any], Iterator[Any]]) -> Target:
    """Return a target for `run_on_ranks`: it joins the ranks, and runs a generator function to its end.

    The ranks use gloo, or NCCL with a GPU each if the setting `device` is cuda. With the setting `simulated_ranks`, a
    single rank joins a world of this size that sends nothing. The generator gets the settings. What it yields on rank 0
    are the rows of the result, plain values.
    """

    @wraps(function)
    def target(settings: Path) -> None:
        config: Any = OmegaConf.load(settings)
        _join(is_gpu=config.get("device") == "cuda", simulated_ranks=config.get("simulated_ranks", 0))
        from torch.distributed import get_rank

        for row in function(config):
            if get_rank() == 0:
                with settings.with_name(_ROWS).open("a", encoding="utf-8") as file:
                    file.write(f"{json.dumps(row)}\n")

    return target


def _join(*, is_gpu: bool, simulated_ranks: int) -> None:
    import torch

    from lightning_cp.compat.torch_names import fake_store

    if is_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if simulated_ranks:
        torch.distributed.init_process_group("fake", store=fake_store(), rank=0, world_size=simulated_ranks)
    else:
        # The launcher has the time limit: a time-out of a collective would be reported as a failure.
        init_process_group("nccl" if is_gpu else "gloo", timeout=timedelta(days=2))


def run_on_ranks(
    function: Target,
    settings: Mapping[Any, Any],
    ranks: int,
    *,
    limit_s: float,
    threads: int = 1,
    launcher: Callable[..., Launcher] = LocalLauncher,
) -> tuple[list[Any], Result]:
    """Run a function that is decorated with `on_ranks`. Returns: its rows, also those before a failure, and the result.

    Args:
        settings: plain values.
        ranks: number of ranks.
        limit_s: time limit in seconds.
        threads: CPU threads per rank; 0 leaves the choice to the environment.
        launcher: makes the launcher from `limit_s`.
    """
    with temporary_folder() as folder:
        path, rows = folder / "settings.yaml", folder / _ROWS
        OmegaConf.save({**settings}, path)
        job = Job(target_of(function), path, ranks, folder / "logs", threads=threads)
        result = launcher(limit_s=limit_s).launch(job)
        lines = rows.read_text(encoding="utf-8").splitlines() if rows.is_file() else []
        return [json.loads(line) for line in lines], result


def modes(ranks: int) -> dict[str, ContextParallelConfig]:
    """Return this library's modes of attention for a number of ranks, by name."""
    configs = {
        "ring allgather": ContextParallelConfig(ring_degree=ranks),
        "ring alltoall": ContextParallelConfig(ring_degree=ranks, rotate_method="alltoall"),
        "Ulysses": ContextParallelConfig(ulysses_degree=ranks),
    }
    if (grid := ContextParallelConfig(ring_degree=ranks, rotate_method="grid")).grid_shape[1] > 1:
        configs["grid"] = grid
    if ranks >= 4 and ranks % 2 == 0:
        configs["unified"] = ContextParallelConfig(ring_degree=2, ulysses_degree=ranks // 2)
    return configs
