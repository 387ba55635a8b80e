"""What a job and SLURM ask of each other: the resources of a sweep's jobs, and another run after it was cut short.

Imports no torch.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.runs.run_folder import not_writable
from lightning_cp.app.settings.table import SettingsError, read
from lightning_cp.launch.external import whole_number

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


def note_run(environ: Mapping[str, str], output_root: Path, run: str, folder: Path) -> None:
    """Write down where this job runs, for when SLURM runs it again.

    Args: run: which of the job's runs it is.
    Raises: SettingsError: `output_root` cannot be written to.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return
    notes = output_root / _NOTES / job
    note = {"run": run, "folder": str(folder.absolute()), "restarts": _restarts(environ)}
    try:
        notes.parent.mkdir(parents=True, exist_ok=True)
        with notes.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(note)}\n")
    except OSError as error:
        raise not_writable("output_root", output_root, error, within=notes) from error


def earlier_runs(environ: Mapping[str, str], output_root: Path, run: str) -> list[Path]:
    """Where the same run of this job ran before SLURM ran the job again, the last first."""
    notes = output_root / _NOTES / environ.get("SLURM_JOB_ID", "none")
    if _restarts(environ) == 0 or not notes.is_file():
        return []
    found = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    same = [note for note in found if note["run"] == run and note["restarts"] < _restarts(environ)]
    return [Path(note["folder"]) for note in reversed(same)]


def _restarts(environ: Mapping[str, str]) -> int:
    return whole_number(environ, "SLURM_RESTART_COUNT") or 0


def check_sweep(config: DictConfig) -> None:
    """Before jobs are submitted. Raises: SettingsError: what `launcher=slurm` asks SLURM for could not run them.

    Args: config: of the sweep, with Hydra's own; settings that are swept have their defaults in it.
    """
    if config.hydra.runtime.choices.get("launcher") != "slurm":
        return
    for key in ("devices", "num_nodes", "accelerator"):
        if any(override.partition("=")[0].lstrip("+") == key and _is_swept(override) for override in _given(config)):
            raise SettingsError(f"{key} cannot be swept with launcher=slurm: SLURM is asked for the same for all jobs")
    devices, nodes = read(config, "devices"), read(config, "num_nodes")
    if devices == "auto" and _nodes(nodes) > 1:
        raise SettingsError(f"num_nodes={nodes} with launcher=slurm needs devices=<ranks of a node>, not auto")
    if read(config, "accelerator") != "cpu" and config.hydra.launcher.gpus_per_node is None:
        raise SettingsError(
            "launcher=slurm needs devices=<GPUs of a node>, so that SLURM is asked for them, or accelerator=cpu"
        )


def _given(config: DictConfig) -> list[str]:
    return [str(override) for override in config.hydra.overrides.task]


def _is_swept(override: str) -> bool:
    return OverridesParser.create().parse_override(override).is_sweep_override()


def _nodes(num_nodes: Any) -> int:
    return num_nodes if isinstance(num_nodes, int) else 1


def _tasks_per_node(num_nodes: Any, devices: Any) -> int:
    """On one node the recipe starts its ranks, as many as a job of the sweep needs; across nodes SLURM does."""
    return devices if _nodes(num_nodes) > 1 and isinstance(devices, int) else 1


def _gpus_per_node(accelerator: Any, devices: Any) -> int | None:
    return devices if accelerator != "cpu" and isinstance(devices, int) else None
