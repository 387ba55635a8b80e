"""Check the folders of media in `data.path`: a path, a folder with settings, or a list of these.

Imports neither torch nor diffusers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.recipes.settings.table import SettingsError, read, show
from lightning_cp.rules import Each, Either, Integer, Number, OneOf, Rule, Text

_NULL = OneOf((None,))
_FILES = (".csv", ".jsonl", ".tar", ".parquet")
_EXPECTED = f"a folder of media, or a {', '.join(_FILES)} file"


class _Name(Text):
    """A text without a slash at its ends, or no text."""

    def passes(self, value: Any) -> bool:
        return value is None or (isinstance(value, str) and value.strip("/ ") == value)

    def describe(self) -> str:
        return "null or a text without slashes at its ends"


class Sizes(Rule):
    """Pairs [height, width], or null."""

    def passes(self, value: Any) -> bool:
        pairs = isinstance(value, list) and value and all(map(Each(Integer(1), 2).passes, value))
        return value is None or bool(pairs)

    def describe(self) -> str:
        return "null or a list of [height, width], such as [[480,832]]"


class _Texts(Rule):
    """Texts by the texts that they replace."""

    def passes(self, value: Any) -> bool:
        texts = value.items() if isinstance(value, Mapping) else [(None, None)]
        return all(isinstance(new, str) and isinstance(old, str) and old != "" for old, new in texts)

    def describe(self) -> str:
        return "texts by the texts that they replace, such as {a man: ohwx man}"


_FIELDS: dict[str, Rule] = {
    "path": Text(),
    "name": _Name(),
    "repeats": Integer(1, 10_000),
    "sizes": Sizes(),
    "weight": Number(above=0),
    "use": OneOf(("train", "prior", "validation")),
    "caption_column": Either(_NULL, Text()),
    "caption": Text(),
    "replace": _Texts(),
}


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
    unknown = [name for name in folder if name not in _FIELDS]
    if unknown or "path" not in folder:
        problem = f"has the unknown setting {unknown[0]}" if unknown else "has no path"
        raise SettingsError(f"{key} {problem}: a folder has the settings {', '.join(_FIELDS)}, and path must be given")
    for name, value in folder.items():
        if not _FIELDS[name].passes(value):
            shown = where if name == "path" else f"{key}.{name}"
            raise SettingsError(f"{shown}={show(value)} is not valid: must be {_FIELDS[name].describe()}")
    path = Path(folder["path"]).absolute()
    if not path.exists() and not any(path.parent.glob(path.name)):
        raise SettingsError(f"{where}={path} does not exist: it must be {_EXPECTED}")
    if not path.is_dir() and path.suffix.lower() not in _FILES:
        raise SettingsError(f"{where}={path} is not valid: must be {_EXPECTED}")
    return {**folder, "path": str(path)}
