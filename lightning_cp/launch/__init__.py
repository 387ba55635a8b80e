"""Start the ranks of a job, watch them, and end all ranks when one fails. Imports no torch."""

from lightning_cp.launch.job import Failure, FailureKind, Job, Launcher, Result
from lightning_cp.launch.local import LocalLauncher
from lightning_cp.launch.machine import Machine
from lightning_cp.launch.rank import ExternalLauncher, LauncherEnv, launcher_env

__all__ = [
    "ExternalLauncher",
    "Failure",
    "FailureKind",
    "Job",
    "Launcher",
    "LauncherEnv",
    "LocalLauncher",
    "Machine",
    "Result",
    "launcher_env",
]
