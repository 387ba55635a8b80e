"""The settings of a recipe, each checked by a table before anything slow begins.

Imports neither torch nor diffusers.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_cp.checkpoint import CHECKPOINT_FORMATS
from lightning_cp.config import ROTATE_METHODS
from lightning_cp.launch.rules import Each, Either, Number, OneOf, Rule, Text, Whole

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
KERNELS = ("auto", "flash", "cudnn", "efficient", "flash_attn", "flash_attn_3", "flash_attn_4", "sage", "math")
ACCELERATORS = ("auto", "cpu", "cuda", "gpu")
_AUTO = OneOf(("auto",))
_ABSENT = object()


class SettingsError(ValueError):
    """A setting that cannot be run: the message names it, its value and what would be valid."""


@dataclass(frozen=True)
class Setting:
    """A key of the configuration and what it may be."""

    key: str
    rule: Rule

    def check(self, config: DictConfig) -> None:
        """Raises: SettingsError: the key is there, and its value does not pass."""
        value = read(config, self.key, _ABSENT)
        if value is not _ABSENT and not self.rule.passes(value):
            raise SettingsError(f"{self.key}={show(value)} is not valid: must be {self.rule.describe()}")


SETTINGS = (
    Setting("ring", Whole(1)),
    Setting("ulysses", Whole(1)),
    Setting("data_parallel", Either(_AUTO, Whole(1))),
    Setting("rotate_method", OneOf(ROTATE_METHODS)),
    Setting("kernel", OneOf(KERNELS)),
    Setting("precision", OneOf(PRECISIONS)),
    Setting("activation_checkpointing", OneOf(("none", "full", "selective"))),
    Setting("accelerator", OneOf(ACCELERATORS)),
    Setting("devices", Either(_AUTO, Whole(1))),
    Setting("num_nodes", Either(_AUTO, Whole(1))),
    Setting("max_steps", Whole(1)),
    Setting("batch_size", Whole(1)),
    Setting("seed", Whole(0, (1 << 63) - 1)),
    Setting("resume", Either(OneOf((None,)), Text())),
    Setting("output_root", Text()),
    Setting("run_dir", Text()),
    Setting("export", OneOf((True, False))),
    Setting("progress", OneOf((True, False))),
    Setting("num_workers", Whole(0)),
    Setting("log_every", Whole(1)),
    Setting("trace_step", Either(OneOf((None,)), Whole(1))),
    Setting("checkpoint_every", Whole(1)),
    Setting("checkpoint_format", OneOf(CHECKPOINT_FORMATS)),
    Setting("checkpoint_async", OneOf((True, False))),
    Setting("keep_checkpoints", Whole(1)),
    Setting("source", Text()),
    Setting("trust", OneOf((True, False))),
    Setting("cfg", Whole(1)),
    Setting("count", Either(OneOf((None,)), Whole(1))),
    Setting("num_steps", Either(OneOf((None,)), Whole(1))),
    Setting("guidance", Either(OneOf((None,)), Number(least=0))),
    Setting("per_call", Whole(1)),
    Setting("format", OneOf(("auto", "png", "gif", "mp4", "wav"))),
    Setting("fps", Whole(1)),
    Setting("vae", OneOf(("auto", True, False))),
    Setting("stages", OneOf(("together", "offload", "release"))),
    Setting("sweep.on_error", OneOf(("continue", "stop"))),
    Setting("optim.lr", Number(above=0)),
    Setting("optim.betas", Each(Number(least=0, below=1), 2)),
    Setting("optim.eps", Number(above=0)),
    Setting("optim.weight_decay", Number(least=0)),
    Setting("warmup_steps", Whole(0)),
    Setting("clip_norm", Number(above=0)),
    Setting("on_nonfinite", OneOf(("error", "skip", "ignore"))),
    Setting("ema_decay", Number(least=0, below=1)),
    Setting("drop_probability", Number(least=0, most=1)),
    Setting("sampling.count", Whole(1)),
    Setting("sampling.num_steps", Whole(1)),
    Setting("sampling.guidance", Number(least=0)),
    Setting("sampling.every", Either(OneOf((None,)), Whole(1))),
    Setting("data.num_samples", Whole(1)),
    Setting("data.num_classes", Whole(1)),
    Setting("data.channels", Whole(1)),
    Setting("data.patch_size", Each(Whole(1), 3)),
    Setting("data.dataset.max_speed", Whole(0)),
    Setting("data.frames", Whole(1)),
    Setting("data.height", Whole(1)),
    Setting("data.width", Whole(1)),
    Setting("model.num_tokens", Whole(2)),
    Setting("model.transformer.num_attention_heads", Whole(1)),
    Setting("model.transformer.attention_head_dim", Whole(2)),
    Setting("model.transformer.in_channels", Whole(1)),
    Setting("model.transformer.ffn_dim", Whole(1)),
    Setting("model.transformer.rope_max_seq_len", Whole(1)),
    Setting("model.transformer.num_layers", Whole(0)),
    Setting("model.transformer.axes_dims_rope", Each(Whole(2), 3)),
    Setting("strategy.convert_to_fp32", OneOf((True, False))),
    Setting("strategy.replicate", Whole(1)),
    Setting("strategy.reshard_after_forward", OneOf((True, False))),
    Setting("strategy.stall_s", Either(OneOf((None,)), Number(above=0))),
    Setting("strategy.check_peers", OneOf(("sampled", "first", "always", "off"))),
)


def read(config: DictConfig, key: str, default: Any = None) -> Any:
    """The value of a dotted key, or the default where the configuration does not have it.

    Raises: SettingsError: it refers to a key that does not exist.
    """
    try:
        value = OmegaConf.select(config, key, default=default)
        return OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
    except OmegaConfBaseException as error:
        raise SettingsError(f"{key} cannot be read: {' '.join(str(error).split())}") from error


def show(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_values(config: DictConfig) -> None:
    """Raises: SettingsError: the first setting of the table whose value is not valid."""
    for setting in SETTINGS:
        setting.check(config)
