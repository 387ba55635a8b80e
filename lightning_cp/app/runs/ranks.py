"""Run a function on ranks of this machine, and collect the rows that it yields."""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_cp.checkpoint.folder import temporary_folder
from lightning_cp.launch import Job, LocalLauncher
from lightning_cp.launch.job import Result
from lightning_cp.launch.rendezvous import init_process_group

Target = Callable[[Path], None]
_ROWS = "rows.jsonl"


def on_ranks(function: Callable[[Any], Iterator[Any]]) -> Target:
    """Return a target for `run_on_ranks`: it joins the ranks over gloo, and runs a generator function to its end.

    The generator gets the settings. What it yields on rank 0 are the rows of the result, plain values.
    """

    @wraps(function)
    def target(settings: Path) -> None:
        # The launcher has the time limit: a time-out of a collective would be reported as a failure.
        init_process_group("gloo", timeout=timedelta(days=2))
        from torch.distributed import get_rank

        for row in function(OmegaConf.load(settings)):
            if get_rank() == 0:
                with settings.with_name(_ROWS).open("a", encoding="utf-8") as file:
                    file.write(f"{json.dumps(row)}\n")

    return target


def run_on_ranks(
    function: Target, settings: Mapping[Any, Any], ranks: int, *, limit_s: float, threads: int = 1
) -> tuple[list[Any], Result]:
    """Run a function that is decorated with `on_ranks`. Returns: its rows, also those before a failure, and the result.

    Args:
        settings: plain values.
        ranks: number of ranks.
        limit_s: time limit in seconds.
        threads: CPU threads per rank; 0 leaves the choice to the environment.
    """
    with temporary_folder() as folder:
        path, rows = folder / "settings.yaml", folder / _ROWS
        OmegaConf.save({**settings}, path)
        job = Job(f"{function.__module__}:{function.__name__}", path, ranks, folder / "logs", threads=threads)
        result = LocalLauncher(limit_s=limit_s).launch(job)
        lines = rows.read_text(encoding="utf-8").splitlines() if rows.is_file() else []
        return [json.loads(line) for line in lines], result
