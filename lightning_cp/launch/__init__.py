"""Ranks of a job: settings checked first, processes started, watched and taken down. Imports no torch."""

from lightning_cp.launch.external import ExternalLauncher, RankPlace, external_place
from lightning_cp.launch.job import Failure, FailureKind, Job, Launcher, Result
from lightning_cp.launch.local import LocalLauncher
from lightning_cp.launch.machine import Machine
from lightning_cp.launch.recipe import check_config, conf_dir, quiet_overrides, run_recipe
from lightning_cp.launch.sampling import check_sampling
from lightning_cp.launch.settings import SettingsError
from lightning_cp.launch.slurm import register_resolvers
from lightning_cp.launch.world import World

register_resolvers()

__all__ = [
    "ExternalLauncher",
    "Failure",
    "FailureKind",
    "Job",
    "Launcher",
    "LocalLauncher",
    "Machine",
    "RankPlace",
    "Result",
    "SettingsError",
    "World",
    "check_config",
    "check_sampling",
    "conf_dir",
    "external_place",
    "quiet_overrides",
    "run_recipe",
]
