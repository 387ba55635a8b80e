"""Add LoRA adapters to a transformer: its weights are frozen, and low-rank matrices of some layers are trained."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cp.compat.versions import needs
from lightning_cp.data.keyed_random import hashed_seed
from lightning_cp.finetune.adapters.lora_file import LoraFile, read_lora
from lightning_cp.finetune.adapters.lora_targets import matched_layers, named_layers, ranks_of_layers
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.settings import LoraSettings

_RANK = 16  # of a new adapter
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def add_lora(
    transformer: nn.Module,
    settings: LoraSettings,
    *,
    family: Family | type[Family] | None = None,
    component: str = "transformer",
    trained: Collection[str] = (),
    seed: int = 0,
) -> list[str]:
    """Freeze a transformer and add a LoRA, in float32 whatever the transformer's dtype. Call it before set-up.

    The matrices are drawn from `seed` and the layers' names: they are equal on all ranks, and the global random state
    is not used. They get values at once, also if the transformer is on the meta device.

    Args:
        transformer: a diffusers model.
        settings: see `LoraSettings`.
        family: its `lora_targets` are adapted unless `settings` names targets.
        component: the transformer's name in the pipeline, for names in `settings.file`.
        trained: names of the pipeline's other models that continue `settings.file`, which may have no further weights.
        seed: seed of the first matrices; the second ones are zero.
    Returns: names of the adapted layers.
    Raises:
        ValueError: diffusers has no adapters for the transformer; a target that matches no layer; a file that does not
            exist, does not fit the transformer, or contradicts `settings`; a rank above the width of a layer; the
            transformer has adapters.
        ImportError: peft is not installed.
    """
    model: Any = transformer
    names, config, file = check_lora(model, settings, family=family, component=component, trained=trained)
    if settings.dora and any(x.is_meta for x in model.parameters()):
        raise ValueError("lora.dora=true needs the weights of the transformer, which are not loaded (strategy=cp_fsdp)")
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # peft draws its own matrices, which are replaced below
        model.add_adapter(config, ADAPTER)
    for name in names:
        layer = model.get_submodule(name)
        if settings.lokr is None:
            set_matrices(layer, name, None if file is None else file.layers[name], seed)
        else:
            set_factors(layer, name, seed)
    return names


def check_lora(
    transformer: nn.Module,
    settings: LoraSettings,
    *,
    family: Family | type[Family] | None,
    component: str,
    trained: Collection[str] = (),
) -> tuple[list[str], Any, LoraFile | None]:
    """Check a LoRA without adding it, also on the meta device, before weights are loaded.

    Returns: names of the layers, peft's config, and `settings.file`.
    Args, Raises: see `add_lora`.
    """
    model: Any = transformer
    if find_spec("peft") is None:
        raise ImportError(needs("LoRA", "peft"))
    if not hasattr(model, "add_adapter"):
        raise ValueError(f"diffusers has no adapters for {type(model).__name__}: train all weights (lora=null)")
    if getattr(model, "peft_config", None):
        raise ValueError(f"{type(model).__name__} already has adapters ({', '.join(model.peft_config)}): remove them")
    file = None if settings.file is None else read_lora(settings.file, component=component, trained=trained)
    names = _layers_to_adapt(model, settings, family, file)
    rank = settings.rank or (_RANK if file is None else file.rank)
    alpha = _checked_alpha(settings, file, rank)
    ranks = ranks_of_layers(settings.ranks or {}, names, type(model).__name__)
    for name in names if settings.lokr is None else ():
        inputs, outputs = _sizes(model.get_submodule(name))
        if ranks.get(name, settings.rank or 0) > max(math.prod(inputs), outputs):
            raise ValueError(
                f"lora.rank={ranks.get(name, rank)} (or lora.ranks) is above the width of {name}, which has "
                f"{math.prod(inputs)} inputs and {outputs} outputs"
            )
    return names, _config(settings, names, rank, alpha, ranks), file


def _sizes(layer: Any) -> tuple[tuple[int, ...], int]:
    """Return the inputs of a layer, for convolutions with their kernel, and its outputs."""
    if isinstance(layer, nn.Linear):
        return (layer.in_features,), layer.out_features
    return (layer.in_channels, *layer.kernel_size), layer.out_channels


def _config(settings: LoraSettings, names: list[str], rank: int, alpha: float, ranks: dict[str, int]) -> Any:
    from peft import LoKrConfig, LoraConfig

    patterns = {"rank_pattern": ranks, "alpha_pattern": ranks if settings.alpha is None else {}}
    if settings.lokr is not None:
        return LoKrConfig(r=rank, alpha=alpha, target_modules=names, decompose_factor=settings.lokr, **patterns)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=names,
        lora_dropout=settings.dropout,
        bias="none",
        use_dora=settings.dora,
        **patterns,
    )


def _layers_to_adapt(
    model: nn.Module, settings: LoraSettings, family: Family | type[Family] | None, file: LoraFile | None
) -> list[str]:
    """Return the names of the layers to adapt, in the model's order. Raises: ValueError: see `add_lora`."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _LAYERS)}
    default = Family.lora_targets if family is None else family.lora_targets
    wanted = None if settings.targets is None else named_layers(settings.targets, layers, type(model).__name__, default)
    if file is not None:
        _check_fits(file, layers, type(model).__name__)
        if settings.rank not in (None, file.rank):
            raise ValueError(
                f"lora.rank={settings.rank} differs from the rank {file.rank} of lora.file={file.path}: leave "
                "lora.rank unset (null) to continue with the file's rank"
            )
        if wanted is not None and set(wanted) != file.layers.keys():
            first = min(set(wanted) ^ file.layers.keys())
            where = "not adapted in" if first in wanted else "adapted in"
            raise ValueError(
                f"lora.targets={settings.targets!r} differ from the layers of lora.file={file.path}: {first} is "
                f"{where} the file. Leave lora.targets unset to continue the file's layers"
            )
        return [name for name in layers if name in file.layers]
    if wanted is not None:
        return wanted
    return matched_layers(default, layers, type(model).__name__, every=False)


def _check_fits(file: LoraFile, layers: Mapping[str, nn.Module], model: str) -> None:
    for name, (a, b) in file.layers.items():
        if name not in layers:
            raise ValueError(f"lora.file={file.path} is of another model: {model} has no layer {name}")
        sizes = _sizes(layers[name])
        if (tuple(a.shape[1:]), b.shape[0]) != sizes or b.shape[1] != a.shape[0]:
            raise ValueError(
                f"lora.file={file.path} is of another model: {name} has the shapes {list(a.shape)} and "
                f"{list(b.shape)}, but the layer of {model} has {list(sizes[0])} inputs and {sizes[1]} outputs"
            )


def _checked_alpha(settings: LoraSettings, file: LoraFile | None, rank: int) -> float:
    saved = None if file is None else file.alpha
    if file is not None and saved is not None and settings.alpha not in (None, saved):
        raise ValueError(
            f"lora.alpha={settings.alpha} differs from alpha={saved} of lora.file={file.path}: leave lora.alpha unset"
        )
    return saved or settings.alpha or rank


ADAPTER = "default"  # name of the adapter in the transformer
_FACTORS = ("lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b")  # of LoKr; the first one starts at zero


def set_matrices(layer: Any, name: str, values: tuple[Tensor, Tensor] | None, seed: int) -> None:
    """Replace the matrices of a layer's LoRA by float32 ones: given ones, or random and zero.

    Args: layer: the adapted layer. name: its name, from which with `seed` the values are drawn.
    """
    a, b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    if values is None:
        values = _drawn(a.weight, _generator(name, seed)), torch.zeros(b.weight.shape, dtype=torch.float32)
    for matrix, value in zip((a, b), values, strict=True):
        matrix.weight = nn.Parameter(value.to(_device(matrix.weight), torch.float32, copy=True))
    if ADAPTER in layer.lora_magnitude_vector:  # DoRA: the norms with these matrices, in float32
        layer.lora_magnitude_vector[ADAPTER].update_layer(
            base_layer=layer.get_base_layer(), lora_A=a.weight, lora_B=b.weight, scaling=layer.scaling[ADAPTER]
        )


def set_factors(layer: Any, name: str, seed: int) -> None:
    """Replace the factors of a layer's LoKr by float32 ones: zero and random, as in peft. See `set_matrices`."""
    generator = _generator(name, seed)
    for kind in _FACTORS:
        factors = getattr(layer, kind)
        if ADAPTER in factors:
            old = factors[ADAPTER]
            value = torch.zeros(old.shape) if kind == _FACTORS[0] else _drawn(old, generator)
            factors[ADAPTER] = nn.Parameter(value.to(_device(old), torch.float32))


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hashed_seed(f"{seed}/{name}"))


def _drawn(like: Tensor, generator: torch.Generator) -> Tensor:
    value = torch.empty(like.shape, dtype=torch.float32)
    return nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)  # as peft does


def _device(x: Tensor) -> torch.device:
    return torch.device("cpu") if x.is_meta else x.device


def scale_second_matrices(optimizer: Optimizer, module: nn.Module, ratio: float) -> None:
    """Multiply the learning rate of the matrices `lora_B` by a ratio. Call it before the optimizer's first step.

    A parameter group that also has other weights keeps them; the matrices get a group with its other settings.

    Args:
        module: has the adapters.
        ratio: learning rate of `lora_B`, divided by that of `lora_A`.
    Raises: ValueError: the optimizer has no such matrices.
    """
    second = {id(x) for name, x in module.named_parameters() if ".lora_B." in name}
    has_second = False
    for group in list(optimizer.param_groups):
        matrices = [x for x in group["params"] if id(x) in second]
        others = [x for x in group["params"] if id(x) not in second]
        has_second |= bool(matrices)
        if matrices and others:
            group["params"] = others
            optimizer.add_param_group({**group, "params": matrices, "lr": group["lr"] * ratio})
        elif matrices:
            group["lr"] *= ratio
    if not has_second:
        raise ValueError(f"lora_lr_ratio={ratio} needs adapters (add_lora): the optimizer has no matrices lora_B")
