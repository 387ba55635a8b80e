"""Fine-tune pretrained diffusers transformers: load them, add adapters, train, validate."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_cp.finetune.adapters.lora import add_lora
    from lightning_cp.finetune.card import ModelCard
    from lightning_cp.finetune.control_pipeline import new_controlnet
    from lightning_cp.finetune.data import divided_loader, hold_out
    from lightning_cp.finetune.host_weights import offload_blocks
    from lightning_cp.finetune.load import load_transformer, meta_transformer
    from lightning_cp.finetune.module import FineTuning
    from lightning_cp.finetune.pipeline import load_pipeline
    from lightning_cp.finetune.prompt_samples import PromptSampler
    from lightning_cp.finetune.quantize import quantize_base
    from lightning_cp.finetune.settings import LoraSettings
    from lightning_cp.finetune.side import SteeredTransformer, freeze_base
    from lightning_cp.finetune.validation import HeldOutData, Validation, ValidationResult, split_validation

__all__ = [
    "FineTuning",
    "HeldOutData",
    "LoraSettings",
    "ModelCard",
    "PromptSampler",
    "SteeredTransformer",
    "Validation",
    "ValidationResult",
    "add_lora",
    "divided_loader",
    "freeze_base",
    "hold_out",
    "load_pipeline",
    "load_transformer",
    "meta_transformer",
    "new_controlnet",
    "offload_blocks",
    "quantize_base",
    "split_validation",
]

# Imported at first use: families are imported without what uses them.
_HOMES = {
    "FineTuning": "module",
    "HeldOutData": "validation",
    "LoraSettings": "settings",
    "ModelCard": "card",
    "PromptSampler": "prompt_samples",
    "SteeredTransformer": "side",
    "Validation": "validation",
    "ValidationResult": "validation",
    "add_lora": "adapters.lora",
    "divided_loader": "data",
    "freeze_base": "side",
    "hold_out": "data",
    "load_pipeline": "pipeline",
    "load_transformer": "load",
    "meta_transformer": "load",
    "new_controlnet": "control_pipeline",
    "offload_blocks": "host_weights",
    "quantize_base": "quantize",
    "split_validation": "validation",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
