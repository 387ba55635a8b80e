"""Let a target of the launchers take its settings as an OmegaConf configuration."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def reads_settings(function: Callable[[Any], None]) -> Callable[[Path], None]:
    """Return a target (see `Job`) that loads the YAML file of the settings and calls a function with them."""

    @wraps(function)
    def target(settings: Path) -> None:
        function(OmegaConf.load(settings))

    return target
