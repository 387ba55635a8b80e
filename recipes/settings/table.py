"""Check each setting of a recipe with a table of rules, before anything slow starts.

Imports neither torch nor diffusers.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_cp.config import KERNEL_NAMES, ROTATE_METHODS
from lightning_cp.finetune.settings import ObjectiveSettings
from lightning_cp.rules import MLP_TILES, Each, Either, Integer, Number, OneOf, Rule, Text, rules_of
from lightning_cp.strategies.settings import StrategySettings

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
ACCELERATORS = ("auto", "cpu", "cuda", "gpu")
_AUTO = OneOf(("auto",))
_ABSENT = object()


class SettingsError(ValueError):
    """A setting is invalid: the message names the setting, its value and the valid values."""


@dataclass(frozen=True)
class Setting:
    """A dotted key of the configuration and the rule for its value."""

    key: str
    rule: Rule

    def check(self, config: DictConfig) -> None:
        """Check the value if the configuration has the key. Raises: SettingsError: the value is invalid."""
        value = read(config, self.key, _ABSENT)
        if value is not _ABSENT and not self.rule.passes(value):
            raise SettingsError(f"{self.key}={show(value)} is not valid: must be {self.rule.describe()}")


_NULL, _FLAG = OneOf((None,)), OneOf((True, False))
_COUNTS = """
    max_steps batch_size log_every checkpoint_every keep_checkpoints cfg pipe patches warmup per_call fps lr_cycles
    cache.cache_interval cache.disable_cache_before_step cache.spatial_attention_block_skip_range optim.min_8bit_size
    sampling.num_samples sampling.num_inference_steps strategy.replicate
    data.num_samples data.num_classes data.channels data.frames data.height data.width
    model.transformer.num_attention_heads model.transformer.in_channels model.transformer.ffn_dim
    model.transformer.rope_max_seq_len
"""
_RULES: dict[str, Rule] = {  # by one or more keys
    "ring ulysses data_parallel devices num_nodes": Either(_AUTO, Integer(1)),
    "rotate_method": OneOf(ROTATE_METHODS),
    "grid": Either(_NULL, Each(Integer(1), 2)),
    "kernel": OneOf(KERNEL_NAMES),
    "precision": OneOf(PRECISIONS),
    "activation_checkpointing": OneOf(("none", "full", "selective", "offload")),
    "mlp_tiles": MLP_TILES,
    "accelerator": OneOf(ACCELERATORS),
    _COUNTS: Integer(1),
    "micro_batch_size trace_step num_samples num_inference_steps lr_steps sampling.every": Either(_NULL, Integer(1)),
    "seed": Integer(0, (1 << 63) - 1),
    "resume": Either(_NULL, Text()),
    "output_root run_dir source": Text(),
    "export progress checkpoint_async logger.offline": _FLAG,
    "strategy.convert_to_fp32 strategy.reshard_after_forward": _FLAG,
    "num_workers cache.max_order warmup_steps data.dataset.max_speed model.transformer.num_layers": Integer(0),
    "guidance_scale": Either(_NULL, Number(minimum=0)),
    "cache.threshold optim.weight_decay sampling.guidance_scale": Number(minimum=0),
    "format": OneOf(("auto", "png", "gif", "mp4", "wav")),
    "vae": OneOf(("auto", True, False)),
    "stages": OneOf(("together", "offload", "release")),
    "cache.spatial_attention_timestep_skip_range": Each(Number(), 2),
    "sweep.on_error": OneOf(("continue", "stop")),
    "optim.lr optim.eps gradient_clip_val": Number(above=0),
    "optim.betas": Each(Number(minimum=0, below=1), 2),
    "optim.fused": OneOf((None, True, False)),
    "lr_schedule": OneOf(("constant", "linear", "cosine", "cosine_with_restarts", "polynomial")),
    "on_nonfinite": OneOf(("error", "skip", "ignore")),
    "ema_decay": Number(minimum=0, below=1),
    "cond_dropout": rules_of(ObjectiveSettings)["cond_dropout"],
    "data.held_out": Integer(0, 1796),
    "data.patch_size": Each(Integer(1), 3),
    "model.num_tokens model.transformer.attention_head_dim": Integer(2),
    "model.transformer.axes_dims_rope": Each(Integer(2), 3),
    **{f"strategy.{name}": rule for name, rule in rules_of(StrategySettings).items()},
}
SETTINGS = tuple(Setting(key, rule) for keys, rule in _RULES.items() for key in keys.split())


def read(config: DictConfig, key: str, default: Any = None) -> Any:
    """Return the value of a dotted key, or the default if the configuration does not have it.

    Raises: SettingsError: it refers to a key that does not exist.
    """
    try:
        value = OmegaConf.select(config, key, default=default)
        return OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
    except OmegaConfBaseException as error:
        raise SettingsError(f"{key} cannot be read: {' '.join(str(error).split())}") from error


def show(value: Any) -> str:
    """Format a value as it is written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_values(config: DictConfig) -> None:
    """Check all settings of the table. Raises: SettingsError: the first invalid setting."""
    is_folder = read(config, "data.kind") == "folder"  # its frames are for encoding, see settings/finetune.py
    for setting in SETTINGS:
        if not (is_folder and setting.key == "data.frames"):
            setting.check(config)
