"""The reference policy of a model with adapters: the same weights, with the adapters switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_cp.pipelines.adapters import adapted_layers, adapter_parameters

_SWITCH = "_disable_adapters"  # peft's own method also changes requires_grad, which DDP and FSDP2 do not follow


@contextmanager
def reference_policy(model: nn.Module) -> Iterator[None]:
    """Switch the adapters (peft) of a model off inside the context: it is then the model before training.

    No weights are copied. The model may be wrapped by Fabric, DDP, FSDP2 or `torch.compile`, and parallel; compiled
    blocks get a second graph. `requires_grad` does not change. Adapters that were off before stay off afterwards.

    It has no gradients: activation checkpointing and `mlp_tiles` compute a forward again in backward, with the adapters
    of then. So enter it under `torch.no_grad()` or `inference_mode`, and call the backward of the policy outside. Where
    gradients shall flow through the reference to its inputs, keep a frozen copy of the model.

        with torch.no_grad(), reference_policy(model):
            reference = model(...)

    Args: model: a module with adapters anywhere inside.
    Ranks: all that run the forward.
    Raises: ValueError: gradients are enabled, at the start or where an adapted layer runs inside (a backward that
        recomputes the policy, too); the model has no adapters, they are merged, or other weights are trained.
    """
    _check_no_gradients()
    layers: list[Any] = list(adapted_layers(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no adapters, so there is no model without them: add a LoRA before set-up "
            "(`lightning_cp.finetune.add_lora`), or keep a frozen copy of the model as the reference"
        )
    if any(layer.merged for layer in layers):
        raise ValueError("the adapters are merged into the weights: call unmerge_adapter() or unfuse_lora() before")
    adapters = adapter_parameters(model)
    trained = [name for name, x in model.named_parameters() if x.requires_grad and x not in adapters]
    if trained:
        raise ValueError(
            f"{trained[0]} is trained and belongs to no adapter, so the model without adapters changes in training, "
            "too: freeze it, or keep a frozen copy of the model as the reference"
        )
    before = [getattr(layer, _SWITCH) for layer in layers]
    checks = [layer.register_forward_pre_hook(_check_no_gradients) for layer in (model, *layers)]
    try:
        for layer in layers:
            setattr(layer, _SWITCH, True)
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            setattr(layer, _SWITCH, state)
        for check in checks:
            check.remove()


def _check_no_gradients(*_: Any) -> None:
    """Refuse gradients: a recomputation cannot know which of its forwards had adapters. Also a forward pre-hook."""
    if torch.is_grad_enabled():
        raise ValueError(
            "reference_policy has no gradients: enter torch.no_grad() before, call backward outside of the context; "
            "keep a frozen copy of the model as the reference where gradients must flow through it to its inputs"
        )
