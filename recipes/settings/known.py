"""Find settings that no configuration of a command has, and the names that were probably meant.

Imports neither torch nor diffusers.
"""

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_cp.recipes.settings.table import SettingsError

EXTRA = "extra"  # key for values of the user's own
_NAMED_BY_USERS = ("models",)  # their keys are names that a user can add to
_GLOBAL = "# @package _global_"
HYDRA_FLAGS = (
    *("help", "version", "cfg", "resolve", "package", "run", "multirun", "info", "hydra-help", "shell-completion"),
    *("config-path", "config-name", "config-dir", "experimental-rerun"),
)
_LIKE = 0.7  # a name that is at least this similar may be meant

Tree = dict[str, Any]


class KnownSettings:
    """The settings in the configuration files of a command.

    Args:
        folder: the folder of the command's configuration.
        name: its primary file, without its ending.
        choices: the chosen option of each group; a group that is missing here, or has an option of the user, counts
            with all its options.
    """

    def __init__(self, folder: Path, name: str, choices: Mapping[str, str | None]) -> None:
        self.tree: Tree = {}
        self._primary = _read(folder / f"{name}.yaml")
        self._options = {path: path.parent.name for path in sorted(folder.glob("*/*.yaml")) if _is_option(path)}
        self._groups = {*self._options.values(), *(name.rpartition("@")[2].partition("/")[0] for name in choices)}
        _merge(self.tree, self._primary)
        for path, group in self._options.items():
            chosen = choices.get(group, "")
            if path.stem == chosen or (chosen is not None and not (path.parent / f"{chosen}.yaml").exists()):
                _merge(self.tree, _read(path, group))

    def unknown(self, config: Mapping[str, Any]) -> list[str]:
        """Return the dotted names of settings that no file has. Arguments of classes (`_target_`) are not looked at."""
        own = {EXTRA, "hydra", *self._groups} - set(self.tree)
        return [key for key in _unknown(config, self.tree, "") if key.partition(".")[0] not in own]

    def removed(self, config: Mapping[str, Any]) -> list[str]:
        """Return the names of single values in the command's own file that Hydra's `~name` has removed."""
        return [key for key, x in self._primary.items() if not isinstance(x, (dict, list)) and key not in config]

    def error(self, key: str, command: str) -> SettingsError:
        """Return the error for an unknown setting: it names those that are most similar, and where own values go."""
        owners = self._owners()
        if owners.get(key):
            return SettingsError(f"{key} is not a setting of {command} with these groups: it belongs to {owners[key]}")
        best = _closest(key, owners.keys() - {key})
        meant = f"did you mean {' or '.join(best)}?" if best else f"`{command} --help` lists the settings."
        return SettingsError(
            f"{key} is not a setting of {command}: {meant} Values of your own go under {EXTRA}: "
            f"+{EXTRA}.{key.split('.')[-1]}=…"
        )

    def option_error(self, group: str, option: str) -> SettingsError:
        """Return the error for an option that a group does not have: it names the closest one, and all."""
        options = sorted(path.stem for path, name in self._options.items() if name == group)
        close = _closest(option, options)
        meant = f"did you mean {close[0]}? All are" if close else "use one of"
        return SettingsError(f"{group}={option} is no option of {group}: {meant} {', '.join(options)}")

    def dashes_error(self, argument: str, command: str) -> SettingsError:
        """Return the error for an argument with two dashes that neither Hydra nor a command takes."""
        name, _, value = argument.removeprefix("--").partition("=")
        flags = [] if value else get_close_matches(name, HYDRA_FLAGS, 1)
        meant = [f"--{x}" for x in flags] or [f"{x}={value or '…'}" for x in _closest(name, self._owners())[:1]]
        advice = f"did you mean {meant[0]}?" if meant else f"`{command} --help` lists the settings."
        return SettingsError(f"{argument} is no option of {command}, which has settings without dashes: {advice}")

    def _owners(self) -> dict[str, str]:
        """Return all settings, each with the option that it belongs to, such as optim=muon; "" without one."""
        owners = dict.fromkeys(_keys(self._primary), "") | dict.fromkeys(self._groups, "")
        for path, group in self._options.items():
            if group != "experiment":
                owners = dict.fromkeys(_keys(_read(path, group)), f"{group}={path.stem}") | owners
        return owners


def _is_option(path: Path) -> bool:
    """Return whether a file is an option of a group, and not another command's, Hydra's or for other projects."""
    return path.parent.name not in ("hydra", "lightning_cp") and not (path.parent / "__init__.py").exists()


def _read(path: Path, package: str = "") -> Tree:
    """Return the settings of a file, in their place in the configuration."""
    content: Any = OmegaConf.to_container(_with_included(path))
    content.pop("hydra", None)
    return {package: content} if package and not path.read_text(encoding="utf-8").startswith(_GLOBAL) else content


def _with_included(path: Path) -> Any:
    """Load a file, merged with those of its folder that its defaults list includes."""
    content: Any = OmegaConf.load(path)
    included = [x for x in content.pop("defaults", []) if isinstance(x, str) and x != "_self_" and "@" not in x]
    return OmegaConf.merge(*(_with_included(path.parent / f"{name}.yaml") for name in included), content)


def _takes_any(value: Any) -> bool:
    """Return whether a node holds the arguments of a class, which refuses unknown ones itself."""
    target = value.get("_target_")
    return target is not None and not str(target).startswith("builtins.")


def _merge(tree: Tree, content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        below = tree.setdefault(str(key), {})  # without keys: any keys are valid below it
        if isinstance(value, dict) and not _takes_any(value):
            _merge(below, value)


def _unknown(config: Mapping[str, Any], tree: Tree, prefix: str) -> Iterator[str]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        below = tree.get(str(key))
        if below is None:
            yield name
        elif isinstance(value, dict) and below and not _takes_any(value) and name not in _NAMED_BY_USERS:
            yield from _unknown(value, below, f"{name}.")


def _keys(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        if key != "_target_":
            yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _closest(key: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that are most similar to a key; none if no name is similar."""
    likeness = {name: _likeness(key, name) for name in names}
    least = max(_LIKE, max(likeness.values()) - 0.15)
    return sorted((name for name in likeness if likeness[name] >= least), key=lambda x: (-likeness[x], x))[:3]


def _likeness(key: str, name: str) -> float:
    """Return how similar two settings are, from 0 to 1: as a whole, or their last words."""
    last = SequenceMatcher(None, key.split(".")[-1], name.split(".")[-1]).ratio()
    return max(SequenceMatcher(None, key, name).ratio(), last - 0.05)
