"""Check the settings of pictures from prompts during fine-tuning.

Imports neither torch nor diffusers.
"""

from omegaconf import DictConfig, OmegaConf

from lightning_cp.finetune.prompt_list import sample_prompts_of
from lightning_cp.recipes.settings.table import Setting, SettingsError, read, show
from lightning_cp.rules import Integer, OneOf


def check_prompts(config: DictConfig) -> None:
    """Check the pictures from prompts. Raises: SettingsError: prompts and steps do not belong together."""
    group = config.get("sampling")
    if not OmegaConf.is_dict(group) or "prompts" not in group:  # sampling=midpoint
        if read(config, "sampling.every") is not None:
            raise SettingsError("sampling.every needs sampling=prompts to fine-tune, or experiment=finetune_<family>")
        return
    Setting("sampling.fps", Integer(1)).check(config)
    Setting("sampling.at_start", OneOf((True, False))).check(config)
    prompts, every = read(config, "sampling.prompts"), read(config, "sampling.every")
    if (every is None) != (prompts is None):
        raise SettingsError(
            f"sampling.every={show(every)} and sampling.prompts={show(prompts)} belong together: set both, or neither"
        )
    if prompts is not None:
        try:
            sample_prompts_of(prompts, setting="sampling.prompts")
        except ValueError as error:
            raise SettingsError(str(error)) from None
    if not OmegaConf.is_dict(group.get("call")):
        raise SettingsError(
            f"sampling.call={show(group.get('call'))} is not valid: must be arguments such as {{guidance_scale: 3.5}}"
        )
