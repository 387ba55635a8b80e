"""The settings of a recipe, checked before anything slow begins: each value by the table, then what they mean together.

Imports neither torch nor diffusers.
"""

import math
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_cp.config import ROTATE_METHODS
from lightning_cp.launch.rules import Either, Number, OneOf, Rule, Text, Whole

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
KERNELS = ("auto", "flash", "cudnn", "efficient", "flash_attn", "flash_attn_3", "math")
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
    Setting("accelerator", OneOf(ACCELERATORS)),
    Setting("devices", Either(_AUTO, Whole(1))),
    Setting("num_nodes", Either(_AUTO, Whole(1))),
    Setting("max_steps", Whole(1)),
    Setting("batch_size", Whole(1)),
    Setting("seed", Whole(0, (1 << 63) - 1)),
    Setting("resume", Either(OneOf((None,)), Text())),
    Setting("output_root", Text()),
    Setting("progress", OneOf((True, False))),
    Setting("num_workers", Whole(0)),
    Setting("log_every", Whole(1)),
    Setting("checkpoint_every", Whole(1)),
    Setting("keep_checkpoints", Whole(1)),
    Setting("sweep.on_error", OneOf(("continue", "stop"))),
    Setting("optim.lr", Number(above=0)),
    Setting("optim.eps", Number(above=0)),
    Setting("optim.weight_decay", Number(least=0)),
    Setting("warmup_steps", Whole(0)),
    Setting("clip_norm", Number(above=0)),
    Setting("ema_decay", Number(least=0, below=1)),
    Setting("drop_probability", Number(least=0, most=1)),
    Setting("sampling.count", Whole(1)),
    Setting("sampling.num_steps", Whole(1)),
    Setting("sampling.guidance", Number(least=0)),
    Setting("sampling.every", Either(OneOf((None,)), Whole(1))),
    Setting("data.num_samples", Whole(1)),
    Setting("data.frames", Whole(1)),
    Setting("data.height", Whole(1)),
    Setting("data.width", Whole(1)),
    Setting("model.num_tokens", Whole(2)),
    Setting("model.transformer.num_attention_heads", Whole(1)),
    Setting("model.transformer.attention_head_dim", Whole(1)),
    Setting("model.transformer.num_layers", Whole(0)),
    Setting("strategy.convert_to_fp32", OneOf((True, False))),
    Setting("strategy.check_peers", OneOf(("first", "always", "off"))),
)


def read(config: DictConfig, key: str, default: Any = None) -> Any:
    """The value of a dotted key, or the default where the configuration does not have it.

    Raises: SettingsError: it refers to a key that does not exist.
    """
    try:
        return OmegaConf.select(config, key, default=default)
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


def check_batch(config: DictConfig, data_parallel: int) -> None:
    """Raises: SettingsError: the global batch does not fit the data set or the data ranks."""
    batch, samples = read(config, "batch_size"), read(config, "data.num_samples")
    if samples is not None and batch > samples:
        raise SettingsError(f"batch_size={batch} is more than the data set has: must be at most {samples}")
    if batch % data_parallel:
        raise SettingsError(
            f"batch_size={batch} is the global batch and must be a multiple of data_parallel={data_parallel}: "
            f"{batch - batch % data_parallel or data_parallel} or {batch + data_parallel - batch % data_parallel}"
        )


def check_model(config: DictConfig) -> None:
    """Raises: SettingsError: the model cannot be spread over that many ranks, or does not take the data."""
    ring, ulysses = read(config, "ring"), read(config, "ulysses")
    heads = read(config, "model.transformer.num_attention_heads")
    if heads is not None and ulysses > heads:
        raise SettingsError(
            f"ulysses={ulysses} needs as many query heads: model.transformer.num_attention_heads={heads}; "
            f"use ulysses from 1 to {heads}, or ring for the rest"
        )
    tokens = sequence_length(config)
    if tokens is not None and tokens < ring * ulysses:
        raise SettingsError(
            f"ring={ring} × ulysses={ulysses} spreads a sequence over {ring * ulysses} ranks, and a sample of this "
            f"data has {tokens} tokens: the product must be at most {tokens}"
        )


def sequence_length(config: DictConfig) -> int | None:
    """Tokens of one sample, from the data's size and patch; None where the data does not say.

    Raises: SettingsError: the patch does not divide the size.
    """
    size = [read(config, f"data.{name}") for name in ("frames", "height", "width")]
    patch = read(config, "data.patch_size")
    if patch is None or None in size:
        return None
    if len(patch) != 3 or not all(Whole(1).passes(part) for part in patch):
        raise SettingsError(f"data.patch_size={patch} is not valid: must be [frames, height, width], whole numbers")
    if any(length % part for length, part in zip(size, patch, strict=True)):
        raise SettingsError(
            f"data.patch_size={list(patch)} must divide data.frames={size[0]}, data.height={size[1]}, "
            f"data.width={size[2]}"
        )
    width = read(config, "data.token_width")
    if width is not None and width != read(config, "data.channels", 1) * math.prod(patch):
        raise SettingsError(
            f"data.token_width={width} is not valid: must be data.channels={read(config, 'data.channels')} × the "
            f"pixels of data.patch_size={list(patch)}"
        )
    frames, rows, columns = (length // part for length, part in zip(size, patch, strict=True))
    return int(frames * rows * columns)
