"""Build the real step of a layout on this rank, with random weights: what its dry run predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.apply import parallelize
from lightning_cp.engine.recompute import checkpoint_blocks
from lightning_cp.engine.rules.paths import class_of
from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.mesh.groups import groups_for
from lightning_cp.nest import replace
from lightning_cp.planning.data_parallel import shard_weights, weights_mesh
from lightning_cp.planning.recording import StepSettings, training_loss
from lightning_cp.planning.request import Request
from lightning_cp.planning.step import Layout

_TIMESTEP = 500  # of 1,000, for inputs that are integers


def build_step(request: Request, layout: Layout, device: torch.device) -> Callable[[], object]:
    """Build the step of `request` with a layout. Returns: a function that runs it once.

    Ranks: the whole world, which must have `layout.ranks` ranks. The process group exists.
    """
    torch.manual_seed(0)
    with torch.device("cpu" if layout.sharded else device):  # sharding moves one unit at a time
        model = request.model.build()
    model.to(request.dtype)
    inputs = {
        name: replace(Tensor, lambda x: _value(x, request, device), x) for name, x in request.model.inputs.items()
    }
    build = _training_step if request.task == "train" else _sampling_step
    return build(model, inputs, request, layout, device)


def _value(x: Tensor, request: Request, device: torch.device) -> Tensor:
    """Return an input with values: random ones for a tensor that has none."""
    dtype = request.dtype if x.is_floating_point() else x.dtype
    if not x.is_meta:
        return x.to(device, dtype)
    if x.is_floating_point():
        return torch.randn(x.shape, dtype=dtype, device=device)
    return torch.full(x.shape, _TIMESTEP, dtype=dtype, device=device)


def _training_step(
    model: Any, inputs: dict[str, Any], request: Request, layout: Layout, device: torch.device
) -> Callable[[], object]:
    """Wrap the model with the strategy that users get for this layout."""
    model.train()
    if request.lora is not None:
        add_lora(model, request.lora)
    checkpoint_blocks(model, layout.checkpointing)
    settings = StepSettings(autocast=request.autocast)
    fabric = Fabric(
        accelerator=device.type,
        devices=layout.ranks,
        strategy=_strategy(model, request, layout),
        precision="bf16-mixed" if request.autocast else "bf16-true" if request.dtype == torch.bfloat16 else "32-true",
    )
    fabric.launch()
    wrapped = fabric.setup_module(model)
    optimizer: Any = fabric.setup_optimizers(settings.optimizer([x for x in wrapped.parameters() if x.requires_grad]))

    def step() -> None:
        fabric.backward(training_loss(wrapped, inputs, settings))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _strategy(model: nn.Module, request: Request, layout: Layout) -> Any:
    if layout.ranks == 1:
        return "auto"
    kind = ContextParallelFSDPStrategy if layout.sharded else ContextParallelStrategy
    return kind(
        ring=layout.ring,
        ulysses=layout.ulysses,
        data_parallel=layout.data,
        rotate_method=layout.rotate_method,
        plans=None if request.plan is None else {class_of(model): request.plan},
        stall_s=None,
    )


def _sampling_step(
    model: nn.Module, inputs: dict[str, Any], request: Request, layout: Layout, device: torch.device
) -> Callable[[], object]:
    """Make the model parallel, as a pipeline's transformer is. Data and CFG ranks compute the same forward."""
    model.eval()
    if layout.ranks > 1:
        config = ContextParallelConfig(
            ring_degree=layout.ring, ulysses_degree=layout.ulysses, rotate_method=layout.rotate_method
        )
        groups = groups_for(config)
        installed = parallelize(model, config, request.plan, groups=groups)
        if layout.sharded:
            shard_weights(model, installed, weights_mesh(groups, "sample", device.type), "sample")

    def step() -> object:
        with torch.inference_mode(), torch.autocast(device.type, request.autocast, enabled=bool(request.autocast)):
            return model(**inputs)

    return step
