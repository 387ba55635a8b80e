"""What a job and SLURM ask of each other: the resources of a sweep's jobs, and another run after it was cut short.

Imports no torch.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_NOTES = ".slurm"  # under output_root: a file for each job, with a line for each folder that it has run in


def register_resolvers() -> None:
    """Makes `${slurm_*:…}` of conf/launcher/slurm.yaml known to OmegaConf."""
    for name, resolver in (("nodes", _nodes), ("tasks_per_node", _tasks_per_node), ("gpus_per_node", _gpus_per_node)):
        OmegaConf.register_new_resolver(f"slurm_{name}", resolver, replace=True)


def requeue(environ: Mapping[str, str]) -> bool:
    """Asks SLURM to run this job again, where it runs one. Returns: whether SLURM will."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return False
    try:
        return subprocess.run(["scontrol", "requeue", job], capture_output=True, check=False).returncode == 0
    except OSError:  # there is no scontrol here
        return False


def note_run(environ: Mapping[str, str], output_root: Path, run_dir: Path) -> None:
    """Writes down where this job runs, for when SLURM runs it again."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return
    notes = output_root / _NOTES / job
    notes.parent.mkdir(parents=True, exist_ok=True)
    with notes.open("a", encoding="utf-8") as file:
        file.write(f"{run_dir.absolute()}\n")


def earlier_runs(environ: Mapping[str, str], output_root: Path) -> list[Path]:
    """The folders of this job's runs before SLURM ran it again, the last first."""
    notes = output_root / _NOTES / environ.get("SLURM_JOB_ID", "none")
    if int(environ.get("SLURM_RESTART_COUNT", "0")) == 0 or not notes.is_file():
        return []
    return [Path(line) for line in reversed(notes.read_text(encoding="utf-8").splitlines())]


def _nodes(num_nodes: Any) -> int:
    return num_nodes if isinstance(num_nodes, int) else 1


def _tasks_per_node(num_nodes: Any, devices: Any) -> int:
    """On one node the recipe starts its ranks, as many as a job of the sweep needs; across nodes SLURM does."""
    return devices if _nodes(num_nodes) > 1 and isinstance(devices, int) else 1


def _gpus_per_node(accelerator: Any, devices: Any) -> int | None:
    return devices if accelerator != "cpu" and isinstance(devices, int) else None
