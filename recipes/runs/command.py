"""Make a command of a main, and a target of its ranks. Imports no torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_cp.compat.versions import missing_package
from lightning_cp.recipes.runs.run_folder import refuse
from lightning_cp.recipes.settings.known import HYDRA_FLAGS, KnownSettings

_FULL_ERROR = "HYDRA_FULL_ERROR"  # if it is 1, Hydra raises its errors; otherwise it prints them, with its advice
_NOT_A_KEY = re.compile(r"Could not override '([^'@]+)'\.(?:\s+No match in the defaults list\.)?\s+To append")
_NOT_AN_OPTION = re.compile(r"Could not find '([^'/]+)/([^'/]+)'\s+Available options in")


def conf_dir(part: str = "") -> str:
    """Return the folder of a command's configuration files: in a clone and in a wheel, `conf` is beside `recipes`.

    Args: part: subfolder of `conf`; "" for `conf` itself.
    """
    return str(Path(__file__).resolve().parents[2] / "conf" / part)


def command(name: str, part: str = "") -> Callable[[Callable[[DictConfig], Any]], Callable[[], Any]]:
    """Return a decorator that makes the `main` of a command: as `hydra.main`, but unknown settings are refused.

    Args:
        name: the primary configuration file.
        part: its folder, see `conf_dir`.
    Raises: SystemExit: a setting or an option is unknown: code 2, with one error that names the closest ones.
    """

    def decorate(run: Callable[[DictConfig], Any]) -> Callable[[], Any]:
        shown = f"lightning-cp {name.replace('_', '-')}"

        @wraps(run)
        def checked(config: DictConfig) -> Any:
            os.environ.pop(_FULL_ERROR, None) if adds else None  # errors of the job itself are Hydra's to print
            known = KnownSettings(Path(conf_dir(part)), name, HydraConfig.get().runtime.choices)
            settings: Any = OmegaConf.to_container(config)
            for key in known.unknown(settings):
                refuse(known.error(key, shown))
            for key in known.removed(settings):
                refuse(f"~{key} removes a setting that {shown} needs: give another value, {key}=…")
            try:
                return run(OmegaConf.create(with_home(settings), flags={"struct": True}))
            except Exception as error:
                if (message := missing_package(error, shown)) is None:
                    raise
                refuse(message)

        adds = _FULL_ERROR not in os.environ
        entry = hydra.main(version_base="1.3", config_path=conf_dir(part), config_name=name)(checked)

        def main() -> Any:
            for argument in sys.argv[1:]:
                flag = argument.removeprefix("--").partition("=")[0]
                if argument.startswith("--") and not any(one.startswith(flag) for one in HYDRA_FLAGS):
                    refuse(KnownSettings(Path(conf_dir(part)), name, {}).dashes_error(argument, shown))
            if adds:
                os.environ[_FULL_ERROR] = "1"
            try:
                return entry()
            except HydraException as error:
                if not adds:
                    raise
                _refuse(error, KnownSettings(Path(conf_dir(part)), name, {}), shown)
            finally:
                if adds:
                    os.environ.pop(_FULL_ERROR, None)

        return main

    return decorate


def with_home(value: Any) -> Any:
    """Return settings with the home folder for each `~` that begins a path: shells do not replace it after `=`."""
    if isinstance(value, dict):
        return {key: with_home(x) for key, x in value.items()}
    if isinstance(value, list):
        return [with_home(x) for x in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _refuse(error: Exception, known: KnownSettings, shown: str) -> NoReturn:
    """Print Hydra's error in our form and exit; for an unknown setting, without its advice to add it."""
    if (found := _NOT_A_KEY.search(str(error))) is not None:
        refuse(known.error(found[1], shown))
    if (found := _NOT_AN_OPTION.search(str(error))) is not None:
        refuse(known.option_error(found[1], found[2]))
    cause = f"\n{error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    refuse(f"{error}{cause}")


def reads_settings(function: Callable[[Any], None]) -> Callable[[Path], None]:
    """Return a target (see `Job`) that loads the YAML file of the settings and calls a function with them."""

    @wraps(function)
    def target(settings: Path) -> None:
        function(OmegaConf.load(settings))

    return target
