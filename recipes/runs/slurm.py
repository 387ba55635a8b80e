"""Work with SLURM: resources for the jobs of a sweep, and requeueing of jobs that ran out of time.

Imports no torch.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lightning_cp.files import no_link
from lightning_cp.launch.rank import read_count
from lightning_cp.recipes.runs.run_folder import not_writable
from lightning_cp.recipes.settings.table import SettingsError, read

_RECORDS = ".slurm"  # under output_root: one file per SLURM job, one line per run folder


def register_resolvers() -> None:
    """Register the OmegaConf resolvers `${slurm_*:…}` of conf/launcher/slurm.yaml."""
    for name, resolver in (("nodes", _nodes), ("tasks_per_node", _tasks_per_node), ("gpus_per_node", _gpus_per_node)):
        OmegaConf.register_new_resolver(f"slurm_{name}", resolver, replace=True)


def requeue(environ: Mapping[str, str]) -> bool:
    """Requeue this SLURM job. Returns: True if SLURM accepted it; False on failure or outside SLURM."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return False
    try:
        return subprocess.run(["scontrol", "requeue", job], capture_output=True, check=False).returncode == 0
    except OSError:  # scontrol is not installed
        return False


def record_run(environ: Mapping[str, str], output_root: Path, run: str, folder: Path) -> None:
    """Record the run folder of this SLURM job, so that a requeued job can resume from it.

    Args: run: hash that identifies the run within the job. folder: run folder.
    Raises: SettingsError: `output_root` cannot be written to.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return
    records = output_root / _RECORDS / job
    record = {"run": run, "folder": str(folder.absolute()), "restarts": _restarts(environ)}
    try:
        records.parent.mkdir(parents=True, exist_ok=True)
        with open(records, "a", encoding="utf-8", opener=no_link) as file:
            file.write(f"{json.dumps(record)}\n")
    except OSError as error:
        raise not_writable("output_root", output_root, error, within=records) from error


def earlier_runs(environ: Mapping[str, str], output_root: Path, run: str) -> list[Path]:
    """Return the folders of this run before SLURM requeued the job, newest first."""
    records = output_root / _RECORDS / environ.get("SLURM_JOB_ID", "none")
    if _restarts(environ) == 0 or not records.is_file():
        return []
    all_records = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    earlier = [record for record in all_records if record["run"] == run and record["restarts"] < _restarts(environ)]
    return [Path(record["folder"]) for record in reversed(earlier)]


def _restarts(environ: Mapping[str, str]) -> int:
    return read_count(environ, "SLURM_RESTART_COUNT") or 0


def check_sweep(config: DictConfig) -> None:
    """Check a sweep before its jobs are submitted.

    Args: config: configuration of the sweep, including `hydra`; swept settings have their default values.
    Raises: SettingsError: the jobs could not run with the resources that `launcher=slurm` requests.
    """
    if config.hydra.runtime.choices.get("launcher") != "slurm":
        return
    swept = {
        str(override).partition("=")[0].lstrip("+")
        for override in config.hydra.overrides.task
        if _is_swept(str(override))
    }
    for key in ("devices", "num_nodes", "accelerator"):
        if key in swept:
            raise SettingsError(
                f"{key} cannot be swept with launcher=slurm: all jobs of a sweep request the same resources"
            )
    devices, nodes = read(config, "devices"), read(config, "num_nodes")
    if devices == "auto" and _nodes(nodes) > 1:
        raise SettingsError(
            f"devices=auto is not valid with launcher=slurm and num_nodes={nodes}: set devices to the number of ranks "
            "per node"
        )
    if read(config, "accelerator") != "cpu" and config.hydra.launcher.gpus_per_node is None:
        raise SettingsError(
            "devices=auto is not valid with launcher=slurm: set devices to the number of GPUs per node, or use "
            "accelerator=cpu"
        )


def _is_swept(override: str) -> bool:
    return OverridesParser.create().parse_override(override).is_sweep_override()


def _nodes(num_nodes: Any) -> int:
    return num_nodes if isinstance(num_nodes, int) else 1


def _tasks_per_node(num_nodes: Any, devices: Any) -> int:
    """Return SLURM tasks per node: 1 on one node, where the recipe starts the ranks; otherwise one task per rank."""
    return devices if _nodes(num_nodes) > 1 and isinstance(devices, int) else 1


def _gpus_per_node(accelerator: Any, devices: Any) -> int | None:
    return devices if accelerator != "cpu" and isinstance(devices, int) else None
