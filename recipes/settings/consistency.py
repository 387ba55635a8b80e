"""Check that the settings of a recipe fit together, before anything slow starts.

Imports neither torch nor diffusers.
"""

import importlib.util
import math
from typing import Any

from omegaconf import DictConfig

from lightning_cp.compat.versions import needs
from lightning_cp.recipes.settings.finetune import check_finetuning, check_no_degrees, is_finetuning
from lightning_cp.recipes.settings.table import SettingsError, read, show
from lightning_cp.recipes.settings.world import shards_weights

_CPU_KERNELS = ("auto", "flash", "math")
# Fixed properties of the data sets; other values are rejected.
_FIXED: dict[str, dict[str, Any]] = {
    "lightning_cp.recipes.digits.data.Digits": {"frames": 1, "height": 8, "width": 8, "channels": 1},
    "lightning_cp.recipes.digits.data.MovingDigits": {"channels": 1},
}
_SCANS, _CLASSES = 1797, 10
_MIN_PIXELS = 8  # side of a digit, in pixels


def check_consistency(config: DictConfig, *, data_parallel: int, accelerator: str) -> None:
    """Run all checks below. Raises: SettingsError: the first contradiction."""
    if is_finetuning(config):
        check_finetuning(config, data_parallel=data_parallel)
    else:
        check_data(config)
        check_no_degrees(config)
        check_batch(config, data_parallel)
        check_model(config)
    check_trace(config)
    check_device(config, accelerator)
    check_optimizer(config)
    check_schedule(config)
    check_logger(config)


def check_trainer(config: DictConfig) -> None:
    """Check that `trainer.*` agrees with the recipe. Args: config: resolved. Raises: SettingsError: it contradicts."""
    for key in ("accelerator", "devices", "num_nodes", "precision"):
        value = read(config, f"trainer.{key}", read(config, key))
        if value != read(config, key):
            raise SettingsError(
                f"trainer.{key}={show(value)} contradicts {key}={show(read(config, key))}: set {key}, "
                f"and leave trainer.{key} out"
            )
    if read(config, "trainer.accumulate_grad_batches", 1) != 1:
        raise SettingsError(
            "trainer.accumulate_grad_batches has no effect: batch_size is the number of samples per optimizer step; to "
            "accumulate gradients, set micro_batch_size"
        )


def check_device(config: DictConfig, accelerator: str) -> None:
    """Check kernel and precision. Raises: SettingsError: this accelerator or strategy cannot run one of them."""
    kernel, precision = read(config, "kernel"), str(read(config, "precision"))
    if read(config, "strategy._target_") == "builtins.str" and kernel != "auto":
        raise SettingsError(f"kernel={kernel} has no effect with strategy=single: leave it out, or use strategy=cp")
    if accelerator == "cpu" and kernel not in _CPU_KERNELS:
        raise SettingsError(f"kernel={kernel} is not valid on CPU: must be one of {', '.join(_CPU_KERNELS)}")
    if accelerator == "cpu" and precision.startswith("16"):
        raise SettingsError(
            f"precision={precision} is not valid: float16 needs a GPU; on CPU use bf16-mixed or 32-true"
        )


_REPLICATED_OPTIMIZERS = {  # beginning of the class -> name in conf/optim, and why sharded weights do not work
    "bitsandbytes.": ("adamw_8bit", "the kernels of bitsandbytes do not take sharded weights"),
    "torch.optim.Adafactor": ("adafactor", "PyTorch's Adafactor does not take sharded weights"),
    "prodigyopt.": ("prodigy", "prodigyopt does not take sharded weights"),
}


def check_optimizer(config: DictConfig) -> None:
    """Check optim. Raises: SettingsError: its package is missing, or it does not fit the strategy or the precision."""
    target = str(read(config, "optim._target_"))
    package = target.partition(".")[0]
    refused = [value for beginning, value in _REPLICATED_OPTIMIZERS.items() if target.startswith(beginning)]
    if refused and shards_weights(config):
        name, reason = refused[0]
        raise SettingsError(
            f"optim={name} does not work with strategy=cp_fsdp: {reason}. Use optim=adamw (its states are sharded as "
            "well) or strategy=cp"
        )
    if importlib.util.find_spec(package) is None:
        raise SettingsError(f"{needs(f'optim._target_={target}', package)}, or use optim=adamw")
    lr, ratio = read(config, "optim.lr"), read(config, "lora.lr_ratio")
    if target.endswith(".Prodigy") and lr < 0.1:
        raise SettingsError(
            f"optim.lr={lr} is a factor of the learning rate that Prodigy finds: use optim.lr=1 (an experiment may set "
            "another)"
        )
    if target.endswith(".Prodigy") and ratio is not None:
        raise SettingsError(f"lora.lr_ratio={ratio} does not work with Prodigy, which finds one learning rate for all")
    if target == "torch.optim.Muon" and config.get("lora") is None:
        raise SettingsError(
            "optim=muon trains matrices only, such as those of adapters: use it with lora.rank, or use optim=adamw"
        )
    if read(config, "optim.fused") and read(config, "precision") == "16-mixed":
        raise SettingsError(
            "optim.fused=true does not work with precision=16-mixed, because gradients are clipped before the fused "
            "step would unscale them: use optim=adamw or bf16-mixed"
        )


def check_schedule(config: DictConfig) -> None:
    """Check the learning-rate schedule. Raises: SettingsError: the cycles of another schedule."""
    cycles, name = read(config, "lr_cycles", 1), read(config, "lr_schedule")
    if cycles != 1 and name != "cosine_with_restarts":
        raise SettingsError(
            f"lr_cycles={cycles} has no effect with lr_schedule={name}: leave it out, or use "
            "lr_schedule=cosine_with_restarts"
        )


def check_logger(config: DictConfig) -> None:
    """Check logger. Raises: SettingsError: its package is not installed."""
    kind = str(read(config, "logger._target_", "")).rpartition(".")[2]
    package = {"TensorBoardLogger": "tensorboard", "WandbLogger": "wandb"}.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise SettingsError(f"{needs(f'logger={package}', package)}, or use logger=csv")


def check_data(config: DictConfig) -> None:
    """Check data sizes. Raises: SettingsError: the data set does not have this size, or a digit does not fit in it."""
    kind = read(config, "data.dataset._target_")
    if kind not in _FIXED:
        return
    held_out = read(config, "data.held_out", 0)
    for key, value in {**_FIXED[kind], "num_samples": _SCANS - held_out, "num_classes": _CLASSES}.items():
        if read(config, f"data.{key}", value) != value:
            raise SettingsError(
                f"data.{key}={show(read(config, f'data.{key}'))} is not valid: {kind} has {key}={value}"
                + ("; data=moving_digits has clips of any size" if key in ("frames", "height", "width") else "")
            )
    for key in ("height", "width"):
        pixels = read(config, f"data.{key}", _MIN_PIXELS)
        if pixels < _MIN_PIXELS:
            raise SettingsError(
                f"data.{key}={pixels} is not valid: must be at least {_MIN_PIXELS}, the size of a digit"
            )


def check_batch(config: DictConfig, data_parallel: int) -> None:
    """Check batch_size. Raises: SettingsError: the global batch does not fit the data set or the data ranks."""
    batch, samples = read(config, "batch_size"), read(config, "data.num_samples")
    if samples is not None and batch > samples:
        raise SettingsError(
            f"batch_size={batch} is not valid: must be at most {samples}, the number of samples in the data set"
        )
    if batch % data_parallel:
        raise SettingsError(
            f"batch_size={batch} is the global batch and must be a multiple of data_parallel={data_parallel}: "
            f"{batch - batch % data_parallel or data_parallel} or {batch + data_parallel - batch % data_parallel}"
        )


def check_trace(config: DictConfig) -> None:
    """Check trace_step. Raises: SettingsError: it is after the last step."""
    step, last = read(config, "trace_step"), read(config, "max_steps")
    if step is not None and step > last:
        raise SettingsError(f"trace_step={step} is not valid: must be at most max_steps={last}")


def check_model(config: DictConfig) -> None:
    """Check the model. Raises: SettingsError: it cannot be sharded over that many ranks, or does not fit the data."""
    _check_transformer(config)
    ring, ulysses = read(config, "ring"), read(config, "ulysses")
    heads = read(config, "model.transformer.num_attention_heads")
    if heads is not None and ulysses > heads:
        raise SettingsError(
            f"ulysses={ulysses} is not valid: must be at most model.transformer.num_attention_heads={heads}; "
            f"use ring for more ranks"
        )
    tokens = sequence_length(config)
    if tokens is not None and tokens < ring * ulysses:
        raise SettingsError(
            f"ring={ring} × ulysses={ulysses} shards a sequence over {ring * ulysses} ranks, but a sample of this "
            f"data has {tokens} tokens: the product must be at most {tokens}"
        )


def sequence_length(config: DictConfig) -> int | None:
    """Return the number of tokens per sample from data size and patch size; None if the configuration lacks them.

    Raises: SettingsError: the patch size does not divide the data size, or data.token_width is wrong.
    """
    grid = _token_grid(config)
    return None if grid is None else math.prod(grid)


def _token_grid(config: DictConfig) -> tuple[int, ...] | None:
    """Return the token grid (frames, rows, columns); None and errors: see `sequence_length`."""
    size = [read(config, f"data.{name}") for name in ("frames", "height", "width")]
    patch = read(config, "data.patch_size")
    if patch is None or None in size:
        return None
    if any(length % patch_length for length, patch_length in zip(size, patch, strict=True)):
        raise SettingsError(
            f"data.patch_size={patch} must divide data.frames={size[0]}, data.height={size[1]}, data.width={size[2]}"
        )
    width = read(config, "data.token_width")
    if width is not None and width != read(config, "data.channels", 1) * math.prod(patch):
        raise SettingsError(
            f"data.token_width={width} is not valid: must be data.channels={read(config, 'data.channels')} × the "
            f"pixels of data.patch_size={patch}"
        )
    return tuple(length // patch_length for length, patch_length in zip(size, patch, strict=True))


def _check_transformer(config: DictConfig) -> None:
    """Check the arguments of the diffusers transformers that the recipes build (Wan and Flux)."""
    kind = str(read(config, "model.transformer._target_", "")).rpartition(".")[2]
    width, head = read(config, "data.channels", 1), read(config, "model.transformer.attention_head_dim")
    if kind == "WanTransformer3DModel":
        for key in ("in_channels", "out_channels"):
            channels = read(config, f"model.transformer.{key}", width)
            if channels != width:
                raise SettingsError(f"model.transformer.{key}={channels} is not valid: must be data.channels={width}")
        if head is not None and head % 2:
            raise SettingsError(f"model.transformer.attention_head_dim={head} is not valid: must be even")
        longest = max(_token_grid(config) or (1,))
        table = read(config, "model.transformer.rope_max_seq_len", longest)
        if table < longest:
            raise SettingsError(
                f"model.transformer.rope_max_seq_len={table} is not valid: must be at least {longest}, the tokens of "
                "a sample along its longest axis"
            )
    axes = read(config, "model.transformer.axes_dims_rope")
    is_checkable = kind == "FluxTransformer2DModel" and axes is not None and head is not None
    if is_checkable and (sum(axes) != head or any(axis % 2 for axis in axes)):
        raise SettingsError(
            f"model.transformer.axes_dims_rope={axes} is not valid: must be even numbers with the sum "
            f"model.transformer.attention_head_dim={head}"
        )
