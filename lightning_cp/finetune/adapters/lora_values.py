"""Draw the first values of adapters: equal on all ranks, whatever the global random state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.data.keyed_random import hashed_seed

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
