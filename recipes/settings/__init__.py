"""Check the settings of a recipe before anything slow starts. Imports no torch."""

from lightning_cp.recipes.settings.table import SettingsError
from lightning_cp.recipes.settings.world import World

__all__ = ["SettingsError", "World"]
