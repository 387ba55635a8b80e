"""Check the settings of a recipe before anything slow starts. Imports no torch."""

from lightning_cp.app.settings.table import SettingsError
from lightning_cp.app.settings.world import World

__all__ = ["SettingsError", "World"]
