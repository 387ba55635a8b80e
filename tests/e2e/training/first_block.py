"""Train the first block of a Qwen-Image transformer, in which the plan expects unused parameters and finds none.

Writes a line to stderr after each of three trainings: the strategy finds unused parameters, does so when more begin to
train, and is told to by the user.
"""

import sys

import torch
from lightning.fabric import Fabric

from lightning_cp.fabric import ContextParallelStrategy
from tests.models.qwen_image import TINY


def train(fabric: Fabric, name: str, *, later: bool) -> None:
    tiny = TINY["qwen_image"]
    model = tiny.build().double()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key.startswith("transformer_blocks.0.img" if not later else "proj_out"))
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or (later and key.startswith("transformer_blocks.0.img")))
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(module(**tiny.arguments(), return_dict=False)[0].square().mean())
        optimizer.step()
    assert module._forward_module.find_unused_parameters
    if fabric.global_rank == 0:
        print(f"trained: {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    for name, settings in (("set-up", {}), ("later", {}), ("user", {"find_unused_parameters": True})):
        strategy = ContextParallelStrategy(ring=2, start_method="fork", **settings)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="64-true")
        fabric.launch(train, name, later=name == "later")
