"""Handle settings that had another name in an earlier version.

The name in the configuration of an earlier run is replaced; on the command line and in a user's own configuration it is
an error that gives the new name. Imports neither torch nor diffusers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.settings.table import SettingsError, show

# Settings of recipes/train.py, as dotted keys: earlier name -> name.
RENAMED_SETTINGS = {
    "clip_norm": "gradient_clip_val",
    "drop_probability": "cond_dropout",
    "sampling.count": "sampling.num_samples",
    "sampling.num_steps": "sampling.num_inference_steps",
    "sampling.guidance": "sampling.guidance_scale",
}
# Settings of recipes/sample.py.
RENAMED_IN_SAMPLING = {
    "count": "num_samples",
    "num_steps": "num_inference_steps",
    "guidance": "guidance_scale",
}
_ABSENT = object()


def refuse_earlier_names(config: DictConfig, renamed: Mapping[str, str] = RENAMED_SETTINGS) -> None:
    """Check that no setting has its earlier name.

    Args: renamed: the names of the recipe's settings, by their earlier names.
    Raises: SettingsError: one has its earlier name; the message gives the new name.
    """
    for earlier, name in renamed.items():
        value = OmegaConf.select(config, earlier, default=_ABSENT, throw_on_resolution_failure=False)
        if value is not _ABSENT:
            raise SettingsError(f"{earlier} was renamed to {name}: use {name}={show(value)}")


def replace_earlier_names(config: dict[str, Any]) -> None:
    """Rename the settings of an earlier run in place. A setting that is there under both names is left as it is."""
    for earlier, name in RENAMED_SETTINGS.items():
        *path, old = earlier.split(".")
        section: Any = config
        for key in path:
            section = section.get(key) if isinstance(section, dict) else None
        new = name.rpartition(".")[2]
        if isinstance(section, dict) and old in section and new not in section:
            section[new] = section.pop(old)


def add_earlier_names(arguments: Sequence[str], renamed: Mapping[str, str] = RENAMED_SETTINGS) -> list[str]:
    """Return command-line arguments in which an earlier name is added to the configuration (`+name=value`).

    Hydra would refuse an unknown key with its own message. Added, it reaches `refuse_earlier_names`.

    Args: arguments: the arguments without the program's name. renamed: see `refuse_earlier_names`.
    """
    return [f"+{x}" if x.partition("=")[0] in renamed else x for x in arguments]
