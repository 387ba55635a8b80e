"""One run or one sweep: its settings, folder, launcher, records, and resubmission on SLURM. Imports no torch."""

from lightning_cp.recipes.runs.command import conf_dir
from lightning_cp.recipes.runs.recipe import check_config, run_recipe
from lightning_cp.recipes.runs.sampling import check_sampling
from lightning_cp.recipes.runs.slurm import register_resolvers

register_resolvers()

__all__ = ["check_config", "check_sampling", "conf_dir", "run_recipe"]
