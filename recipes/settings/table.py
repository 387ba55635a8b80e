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


SETTINGS = (
    Setting("ring", Either(_AUTO, Integer(1))),
    Setting("ulysses", Either(_AUTO, Integer(1))),
    Setting("data_parallel", Either(_AUTO, Integer(1))),
    Setting("rotate_method", OneOf(ROTATE_METHODS)),
    Setting("grid", Either(OneOf((None,)), Each(Integer(1), 2))),
    Setting("kernel", OneOf(KERNEL_NAMES)),
    Setting("precision", OneOf(PRECISIONS)),
    Setting("activation_checkpointing", OneOf(("none", "full", "selective", "offload"))),
    Setting("mlp_tiles", MLP_TILES),
    Setting("accelerator", OneOf(ACCELERATORS)),
    Setting("devices", Either(_AUTO, Integer(1))),
    Setting("num_nodes", Either(_AUTO, Integer(1))),
    Setting("max_steps", Integer(1)),
    Setting("batch_size", Integer(1)),
    Setting("micro_batch_size", Either(OneOf((None,)), Integer(1))),
    Setting("seed", Integer(0, (1 << 63) - 1)),
    Setting("resume", Either(OneOf((None,)), Text())),
    Setting("output_root", Text()),
    Setting("run_dir", Text()),
    Setting("export", OneOf((True, False))),
    Setting("progress", OneOf((True, False))),
    Setting("num_workers", Integer(0)),
    Setting("log_every", Integer(1)),
    Setting("trace_step", Either(OneOf((None,)), Integer(1))),
    Setting("checkpoint_every", Integer(1)),
    Setting("checkpoint_async", OneOf((True, False))),
    Setting("keep_checkpoints", Integer(1)),
    Setting("source", Text()),
    Setting("cfg", Integer(1)),
    Setting("pipe", Integer(1)),
    Setting("patches", Integer(1)),
    Setting("warmup", Integer(1)),
    Setting("num_samples", Either(OneOf((None,)), Integer(1))),
    Setting("num_inference_steps", Either(OneOf((None,)), Integer(1))),
    Setting("guidance_scale", Either(OneOf((None,)), Number(minimum=0))),
    Setting("per_call", Integer(1)),
    Setting("format", OneOf(("auto", "png", "gif", "mp4", "wav"))),
    Setting("fps", Integer(1)),
    Setting("vae", OneOf(("auto", True, False))),
    Setting("stages", OneOf(("together", "offload", "release"))),
    Setting("cache.threshold", Number(minimum=0)),
    Setting("cache.cache_interval", Integer(1)),
    Setting("cache.disable_cache_before_step", Integer(1)),
    Setting("cache.max_order", Integer(0)),
    Setting("cache.spatial_attention_block_skip_range", Integer(1)),
    Setting("cache.spatial_attention_timestep_skip_range", Each(Number(), 2)),
    Setting("sweep.on_error", OneOf(("continue", "stop"))),
    Setting("optim.lr", Number(above=0)),
    Setting("optim.betas", Each(Number(minimum=0, below=1), 2)),
    Setting("optim.eps", Number(above=0)),
    Setting("optim.weight_decay", Number(minimum=0)),
    Setting("optim.fused", OneOf((None, True, False))),
    Setting("optim.min_8bit_size", Integer(1)),
    Setting("logger.offline", OneOf((True, False))),
    Setting("warmup_steps", Integer(0)),
    Setting("lr_schedule", OneOf(("constant", "linear", "cosine", "cosine_with_restarts", "polynomial"))),
    Setting("lr_steps", Either(OneOf((None,)), Integer(1))),
    Setting("lr_cycles", Integer(1)),
    Setting("gradient_clip_val", Number(above=0)),
    Setting("on_nonfinite", OneOf(("error", "skip", "ignore"))),
    Setting("ema_decay", Number(minimum=0, below=1)),
    Setting("cond_dropout", rules_of(ObjectiveSettings)["cond_dropout"]),
    Setting("sampling.num_samples", Integer(1)),
    Setting("sampling.num_inference_steps", Integer(1)),
    Setting("sampling.guidance_scale", Number(minimum=0)),
    Setting("sampling.every", Either(OneOf((None,)), Integer(1))),
    Setting("data.num_samples", Integer(1)),
    Setting("data.held_out", Integer(0, 1796)),
    Setting("data.num_classes", Integer(1)),
    Setting("data.channels", Integer(1)),
    Setting("data.patch_size", Each(Integer(1), 3)),
    Setting("data.dataset.max_speed", Integer(0)),
    Setting("data.frames", Integer(1)),
    Setting("data.height", Integer(1)),
    Setting("data.width", Integer(1)),
    Setting("model.num_tokens", Integer(2)),
    Setting("model.transformer.num_attention_heads", Integer(1)),
    Setting("model.transformer.attention_head_dim", Integer(2)),
    Setting("model.transformer.in_channels", Integer(1)),
    Setting("model.transformer.ffn_dim", Integer(1)),
    Setting("model.transformer.rope_max_seq_len", Integer(1)),
    Setting("model.transformer.num_layers", Integer(0)),
    Setting("model.transformer.axes_dims_rope", Each(Integer(2), 3)),
    *(Setting(f"strategy.{name}", rule) for name, rule in rules_of(StrategySettings).items()),
    Setting("strategy.convert_to_fp32", OneOf((True, False))),
    Setting("strategy.replicate", Integer(1)),
    Setting("strategy.reshard_after_forward", OneOf((True, False))),
)


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
