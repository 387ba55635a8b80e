"""Check the settings of pictures from prompts during fine-tuning.

Imports neither torch nor diffusers.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.app.settings.table import Setting, SettingsError, read, show
from lightning_cp.files import why_not_regular
from lightning_cp.rules import Integer, Text


def check_prompts(config: DictConfig) -> None:
    """Check the pictures from prompts. Raises: SettingsError: prompts and steps do not belong together."""
    group = config.get("sampling")
    if not OmegaConf.is_dict(group) or "prompts" not in group:  # sampling=midpoint
        if read(config, "sampling.every") is not None:
            raise SettingsError("sampling.every needs sampling=prompts to fine-tune, or experiment=finetune_<family>")
        return
    Setting("sampling.fps", Integer(1)).check(config)
    prompts, every = read(config, "sampling.prompts"), read(config, "sampling.every")
    if (every is None) != (prompts is None):
        raise SettingsError(
            f"sampling.every={show(every)} and sampling.prompts={show(prompts)} belong together: set both, or neither"
        )
    if prompts is not None and not (isinstance(prompts, list) and prompts and all(map(Text().passes, prompts))):
        raise SettingsError(f"sampling.prompts={show(prompts)} is not valid: must be a list such as [a red fox]")
    images = read(config, "sampling.images", None)
    if images is not None:
        _check_images(images, prompts)
    if not OmegaConf.is_dict(group.get("call")):
        raise SettingsError(
            f"sampling.call={show(group.get('call'))} is not valid: must be arguments such as {{guidance_scale: 3.5}}"
        )


def _check_images(images: Any, prompts: list[str] | None) -> None:
    expected = "must be a list of files, one for each of sampling.prompts"
    if not isinstance(images, list) or not all(map(Text().passes, images)) or len(images) != len(prompts or ()):
        raise SettingsError(f"sampling.images={show(images)} is not valid: {expected} ({len(prompts or ())})")
    missing = next((file for file in images if not Path(file).is_file()), None)
    if missing is not None:
        raise SettingsError(f"sampling.images: {missing} {why_not_regular(missing)}: {expected}")
