"""DDP strategies: weights are replicated on all data x context ranks; build and check the gradient buckets of DDP."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.checkpoint import CheckpointError
from lightning_cp.checkpoint.safe_load import allows_code, check_file
from lightning_cp.compat.torch_names import is_traceable_wrapper_subclass
from lightning_cp.engine.apply import Installed
from lightning_cp.strategies.mixin import ContextParallelMixin


def build_ddp_buckets(ddp: DistributedDataParallel) -> DistributedDataParallel:
    """Build the final gradient buckets before training, with one backward of empty slices.

    DDP rebuilds its buckets after its first backward, which changes the summation order over ranks. The first step of
    a resumed run would then differ in its last bits from the same step of the original run. Here the first backward
    has zero gradients, in reverse parameter order, before training.

    Nothing is done if DDP keeps its first buckets (`find_unused_parameters`) or records the first training step
    (`static_graph`), or if parameters have hooks, which would see these gradients.

    Returns: the same object.
    Ranks: the whole world.
    """
    parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) or p._backward_hooks for p in parameters)
    if ddp.find_unused_parameters or ddp.static_graph or ddp.process_group.size() == 1 or hooked:
        return ddp
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with torch.enable_grad():
        nothing = torch.stack([parameter.flatten()[:0].float().sum() for parameter in parameters]).sum()
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    nothing.backward()  # type: ignore[no-untyped-call]
    ddp.reducer._rebuild_buckets()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return ddp


def averaged_parameters(ddp: DistributedDataParallel) -> dict[str, object]:
    """Return the parameters that train, by name, with the node at which DDP gets the gradient.

    A cast, a move or a replaced parameter gives another node, on which DDP has no hook.
    """
    return {
        name: None if ddp.mixed_precision is not None else get_gradient_edge(x).node  # DDP casts them itself
        for name, x in ddp.module.named_parameters()
        if x.requires_grad and name not in ddp.parameters_to_ignore
    }


def check_trained(at_setup: Mapping[str, object], ddp: nn.Module) -> None:
    """Check that DDP averages what trains now. Args: at_setup: see `averaged_parameters`.

    Raises: ValueError: other parameters train than at set-up. Frozen ones are allowed, if DDP looks for unused ones.
    """
    assert isinstance(ddp, DistributedDataParallel), "added by setup"
    now = averaged_parameters(ddp)
    new = next((name for name, node in now.items() if node is not at_setup.get(name, ddp)), None)
    frozen = next((name for name in at_setup if name not in now), None)
    finds_unused = ddp.find_unused_parameters and not ddp.static_graph
    if new is not None:
        change = "was cast, moved or replaced" if new in at_setup else "began to train"
    elif frozen is not None and now and not finds_unused:
        change = "was frozen or removed"
    else:
        return
    raise ValueError(
        f"{new or frozen} {change} after set-up, and DistributedDataParallel averages gradients of the parameters of "
        "set-up only: leave all that will train trainable at set-up, and freeze it afterwards, with the setting "
        "find_unused_parameters=True; load values into the adapters and layers of set-up; for another precision in "
        "some steps, use torch.autocast. Strategy cp_fsdp trains what is unfrozen later"
    )


def check_reduced(ddp: DistributedDataParallel) -> None:
    """Check that the last backward has averaged all gradients. Raises: ValueError: parameters got no gradient."""
    if ddp.find_unused_parameters or ddp.static_graph or ddp.process_group.size() == 1:
        return
    try:
        ddp.reducer._rebuild_buckets()  # raises if a reduction has begun and not ended
    except RuntimeError as error:
        unused_indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if unused_indices is None:
            raise
        trained = list(averaged_parameters(ddp))
        unused = [trained[int(index)] for index in unused_indices[1].split()]
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        raise ValueError(
            f"the loss does not use the trained parameters {', '.join(unused[:3])}{more}, so their gradients and those "
            "of others were not averaged over the ranks: set ContextParallelStrategy(find_unused_parameters=True), or "
            "freeze them"
        ) from error


class DDPMixin(ContextParallelMixin):
    """Shard the tokens of each sample over ring x ulysses ranks; replicate weights; average gradients over all ranks.

    Args: see `ContextParallelMixin`. Settings of Lightning's DDPStrategy and PyTorch's DDP are accepted too.
    """

    _kwargs_targets = (DistributedDataParallel,)

    def _check_checkpoint(self, path: Any, weights_only: bool | None) -> bool | None:
        """Check a checkpoint before Lightning loads it. Returns: `weights_only` for Lightning.

        Raises: CheckpointError: a folder in DCP's format, a damaged file, or more than tensors and plain values.
        """
        if (Path(path) / ".metadata").is_file():
            raise CheckpointError(
                f"{path} is a sharded checkpoint (one file per rank), and ContextParallelStrategy reads single files: "
                "save it with ContextParallelFSDPStrategy(save_distributed_checkpoint=False), or convert it with "
                "`fabric consolidate`"
            )
        io = self._lightning.checkpoint_io
        reads_torch_files = isinstance(getattr(io, "checkpoint_io", io), TorchCheckpointIO)  # AsyncCheckpointIO has one
        if allows_code(weights_only) or not reads_torch_files:
            return weights_only
        if Path(path).is_file():
            check_file(Path(path))
        return True  # for a URL (https://...), Lightning takes None as False

    def _wrap(self, module: nn.Module) -> list[Installed]:
        if self.context.unused_parameters(module) and "find_unused_parameters" not in self._lightning._ddp_kwargs:
            self._lightning._ddp_kwargs["find_unused_parameters"] = True
        if any(is_traceable_wrapper_subclass(parameter) for parameter in module.parameters()):
            # `equal_initial_weights` compares and sends the tensors inside of quantised weights. DDP would broadcast
            # the weights themselves, which torchao's do not support.
            self._lightning._ddp_kwargs.setdefault("init_sync", False)
        return super()._wrap(module)

    def _leave_in_host(self, module: nn.Module) -> None:
        """Leave frozen weights in host memory out of DDP, which takes weights of one kind of device only."""
        if self._lightning.root_device.type == "cpu":
            return
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        names = [name for name, x in module.named_parameters() if not x.requires_grad and x.device.type == "cpu"]
        if names:
            attribute: Any = [*ignored, *(name for name in names if name not in ignored)]
            module._ddp_params_and_buffers_to_ignore = attribute

    def _adapter(self, wrapper: nn.Module) -> Callable[[nn.Module], None]:
        assert isinstance(wrapper, DistributedDataParallel), "made by setup"
        return partial(check_trained, averaged_parameters(wrapper))

    def _check_reduced(self) -> None:
        for wrapper in self._agreement.wrappers():
            if isinstance(wrapper, DistributedDataParallel):
                check_reduced(wrapper)
