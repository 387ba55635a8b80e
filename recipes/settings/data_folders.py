"""Check the folders of media in `data.path`: a path, a folder with settings, or a list of these.

Imports neither torch nor diffusers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.finetune.settings import TABLE_SUFFIXES, DataFolder
from lightning_cp.recipes.settings.table import SettingsError, read, show
from lightning_cp.rules import rules_of

_EXPECTED = rules_of(DataFolder)["path"].describe()


def data_folders(config: DictConfig) -> list[dict[str, Any]]:
    """Return the settings of each folder of `data.path`, with absolute paths.

    Raises: SettingsError: a setting is not valid, or a path is missing.
    """
    value = read(config, "data.path")
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    folders = value if isinstance(value, list) else [value]
    if not folders:
        raise SettingsError(f"data.path=[] is not valid: must be {_EXPECTED}, or a list of these")
    return [
        _checked(folder, f"data.path[{i}]" if isinstance(value, list) else "data.path")
        for i, folder in enumerate(folders)
    ]


def _checked(folder: Any, key: str) -> dict[str, Any]:
    if not isinstance(folder, Mapping):
        folder, where = {"path": folder}, key
    else:
        where = f"{key}.path"
    rules = rules_of(DataFolder)
    unknown = [name for name in folder if name not in rules]
    if unknown or "path" not in folder:
        problem = f"has the unknown setting {unknown[0]}" if unknown else "has no path"
        raise SettingsError(f"{key} {problem}: a folder has the settings {', '.join(rules)}, and path must be given")
    for name, value in folder.items():
        if not rules[name].passes(value):
            shown = where if name == "path" else f"{key}.{name}"
            raise SettingsError(f"{shown}={show(value)} is not valid: must be {rules[name].describe()}")
    path = Path(folder["path"]).absolute()
    if not path.exists():
        raise SettingsError(f"{where}={path} does not exist: it must be {_EXPECTED}")
    if not path.is_dir() and path.suffix.lower() not in TABLE_SUFFIXES:
        raise SettingsError(f"{where}={path} is not valid: must be {_EXPECTED}")
    return {**folder, "path": str(path)}
