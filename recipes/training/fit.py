"""Train with Fabric or with Lightning's Trainer."""

from collections.abc import Callable

from omegaconf import DictConfig

from lightning_cp.recipes.training.run import Run
from lightning_cp.recipes.training.setup import TrainingSetup
from lightning_cp.recipes.training.with_fabric import fit_with_fabric
from lightning_cp.recipes.training.with_trainer import fit_with_trainer


def fit_model(
    config: DictConfig,
    build: Callable[[DictConfig], TrainingSetup],
    *,
    after_step: Callable[[Run], None],
    at_end: Callable[[Run], None],
) -> None:
    """Train as `config.flavour` selects. Call it on every rank.

    Args:
        config: resolved configuration of a recipe.
        build: builds the model, data and objective, once the ranks are connected and seeded.
        after_step: called on every rank before the first step, when `step` is 0, and after each step.
        at_end: called on every rank, while the model is still on its training device.
    """
    fits = {"fabric": fit_with_fabric, "pytorch": fit_with_trainer}
    fits[config.flavour](config, build, after_step, at_end)
