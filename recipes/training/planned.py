"""Plan the degrees of a training run from its settings: its model, its largest sample, and its batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from lightning_cp.engine.meta import weights_on_meta
from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.finetune.load import meta_transformer
from lightning_cp.finetune.settings import LoraSettings
from lightning_cp.finetune.side import freeze_base, until_called
from lightning_cp.mesh.degrees import AUTO
from lightning_cp.planning.degrees import Degrees, choose_degrees, device_of, planned
from lightning_cp.planning.devices import GB
from lightning_cp.planning.search import Request
from lightning_cp.recipes.settings.components import components_of
from lightning_cp.recipes.settings.finetune import is_finetuning, lora_settings
from lightning_cp.recipes.settings.table import show
from lightning_cp.recipes.settings.world import shards_weights
from lightning_cp.recipes.training.finetune import FineTune
from lightning_cp.recipes.training.from_scratch import FromScratch
from lightning_cp.strategies.auto_degrees import AUTOCAST_OF, DTYPE_OF

_RESERVED_GB = 2.0


def plan_training(config: DictConfig, ranks: int, *, node_ranks: int, gpu: tuple[str, int] | None) -> Degrees:
    """Choose the degrees that are "auto".

    Args: gpu: name and bytes of memory of a rank's GPU; None: the CPU.
    Raises: ValueError: see `choose_degrees`; or the planner does not know this kind of run.
    """
    _check(config)
    keys = {"ring": config.ring, "ulysses": config.ulysses, "data": config.data_parallel}
    fixed = {name: value for name, value in keys.items() if value != AUTO}
    level = str(config.activation_checkpointing).replace("offload", "full")  # which needs more memory
    fixed |= {"sharded": shards_weights(config), "checkpointing": level, "rotate_method": config.rotate_method}
    device, precision = device_of(gpu, node_ranks), str(config.precision)
    setup = FineTune.of(config) if is_finetuning(config) else FromScratch.of(config)
    module, transformer = _finetuned(config, setup) if isinstance(setup, FineTune) else _denoiser(config)
    lora = _adapters(config, setup, transformer)
    averaged = 0 if lora is not None else 4 * sum(x.numel() for x in transformer.parameters() if x.requires_grad)
    reserved = _RESERVED_GB + averaged / GB / (ranks if shards_weights(config) else 1)  # the EMA is on the device
    if reserved >= device.memory_gb:
        raise ValueError(f"the averaged weights (EMA) need {reserved:.1f} GB of {device.memory_gb:.4g} GB on each rank")

    def request_of(data: int) -> Request | None:
        samples, rest = divmod(config.batch_size, data)
        if rest or not samples:
            return None
        samples = 1 if setup.family.one_per_call else min(samples, config.micro_batch_size or samples)
        model = planned(transformer, _arguments(setup, module, transformer, samples), _largest(setup)[1])
        return Request(
            model,
            ranks,
            device,
            reserved_gb=reserved,
            adapt=None if lora is None else partial(add_lora, settings=lora),
            dtype=DTYPE_OF.get(precision, next(transformer.parameters()).dtype),
            autocast=AUTOCAST_OF.get(precision),
            batch_size=samples,
            mlp_tiles=config.mlp_tiles,
        )

    return choose_degrees(request_of, ranks, fixed)


def _check(config: DictConfig) -> None:
    """Raise ValueError if a run of fine-tuning cannot be planned."""
    if not is_finetuning(config):
        return
    model, names = config.model, components_of(config)
    if config.data.kind != "latents":
        raise ValueError("sizes are known once the data are encoded: run lightning-cp precompute first, or set degrees")
    unknown = {"model.component": names if names not in (["transformer"], ["transformer_2"]) else None}
    unknown |= {"model.quantize": model.quantize, "model.offload": model.offload or None}
    unknown |= {"lora.dora": None if config.lora is None else config.lora.dora or None}
    for key, value in unknown.items():
        if value is not None:
            raise ValueError(f"{key}={show(value)} cannot be planned: set ring and ulysses")


def _finetuned(config: DictConfig, setup: FineTune) -> tuple[nn.Module, nn.Module]:
    dtype = getattr(torch, config.model.dtype)
    model = meta_transformer(config.model.pretrained, components_of(config)[0], dtype=dtype).requires_grad_(True)
    freeze_base(model, setup.family)
    return model, model


def _denoiser(config: DictConfig) -> tuple[nn.Module, nn.Module]:
    with weights_on_meta():
        module: Any = instantiate(config.model, _convert_="all")
    for child in module.children():
        if child is not module.transformer:
            child.to_empty(device="cpu")  # it computes arguments of the transformer
    return module, module.transformer


def _adapters(config: DictConfig, setup: FineTune | FromScratch, transformer: nn.Module) -> LoraSettings | None:
    """Return the adapters with the names of their layers, which the planner cannot look up in the family."""
    settings = lora_settings(config)
    if settings is None:
        return None
    with torch.device("meta"):
        adapted: Any = planned(transformer, {}).build()
    components = components_of(config)
    names = add_lora(adapted, settings, family=setup.family, component=components[0], trained=components)
    return replace(settings, targets=names, file=None)


def _largest(setup: FineTune | FromScratch) -> tuple[int, int]:
    """Return the number of the largest sample, and its tokens."""
    tokens = list(getattr(setup.dataset, "tokens", None) or [setup.tokens])
    return tokens.index(max(tokens)), max(tokens)


def _arguments(
    setup: FineTune | FromScratch, module: nn.Module, transformer: nn.Module, samples: int
) -> dict[str, Any]:
    """Return the arguments of the transformer for so many of the largest samples."""
    stored = setup.collate([setup.dataset[_largest(setup)[0]]] * samples)
    with until_called(transformer) as arguments, torch.no_grad():
        setup.objective.loss(module, setup.family, stored, step=0, first_index=0)
    return arguments
