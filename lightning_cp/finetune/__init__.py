"""Fine-tune pretrained diffusers transformers: load them, add adapters, train, validate."""

from lightning_cp.finetune.card import ModelCard
from lightning_cp.finetune.data import hold_out
from lightning_cp.finetune.load import load_transformer, meta_transformer
from lightning_cp.finetune.lora import LoraSettings, add_lora
from lightning_cp.finetune.module import FineTuning
from lightning_cp.finetune.prompt_samples import PromptSampler
from lightning_cp.finetune.quantize import quantize_base
from lightning_cp.finetune.validation import HeldOutData, Validation, ValidationResult, split_validation

__all__ = [
    "FineTuning",
    "HeldOutData",
    "LoraSettings",
    "ModelCard",
    "PromptSampler",
    "Validation",
    "ValidationResult",
    "add_lora",
    "hold_out",
    "load_transformer",
    "meta_transformer",
    "quantize_base",
    "split_validation",
]
