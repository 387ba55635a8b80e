"""Fine-tune pretrained diffusers transformers: load them, add adapters, train, validate."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_cp.finetune.adapters.lora import add_lora as add_lora
    from lightning_cp.finetune.card import ModelCard as ModelCard
    from lightning_cp.finetune.control_pipeline import new_controlnet as new_controlnet
    from lightning_cp.finetune.data import divided_loader as divided_loader
    from lightning_cp.finetune.data import hold_out as hold_out
    from lightning_cp.finetune.host_weights import offload_blocks as offload_blocks
    from lightning_cp.finetune.load import load_transformer as load_transformer
    from lightning_cp.finetune.load import meta_transformer as meta_transformer
    from lightning_cp.finetune.module import FineTuning as FineTuning
    from lightning_cp.finetune.pipeline import load_pipeline as load_pipeline
    from lightning_cp.finetune.prompt_samples import PromptSampler as PromptSampler
    from lightning_cp.finetune.quantize import quantize_base as quantize_base
    from lightning_cp.finetune.settings import LoraSettings as LoraSettings
    from lightning_cp.finetune.side import SteeredTransformer as SteeredTransformer
    from lightning_cp.finetune.side import freeze_base as freeze_base
    from lightning_cp.finetune.validation import HeldOutData as HeldOutData
    from lightning_cp.finetune.validation import Validation as Validation
    from lightning_cp.finetune.validation import ValidationResult as ValidationResult
    from lightning_cp.finetune.validation import split_validation as split_validation

# Imported at first use: families are imported without what uses them.
_NAMES = {
    "adapters.lora": "add_lora",
    "card": "ModelCard",
    "control_pipeline": "new_controlnet",
    "data": "divided_loader hold_out",
    "host_weights": "offload_blocks",
    "load": "load_transformer meta_transformer",
    "module": "FineTuning",
    "pipeline": "load_pipeline",
    "prompt_samples": "PromptSampler",
    "quantize": "quantize_base",
    "settings": "LoraSettings",
    "side": "SteeredTransformer freeze_base",
    "validation": "HeldOutData Validation ValidationResult split_validation",
}
__all__ = sorted(name for names in _NAMES.values() for name in names.split())


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
