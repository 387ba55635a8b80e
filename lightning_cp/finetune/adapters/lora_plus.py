"""LoRA+: a larger learning rate for the second matrices of adapters (arXiv:2402.12354)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


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
