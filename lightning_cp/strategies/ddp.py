"""DDP strategies: weights are replicated on all data x context ranks (DistributedDataParallel)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.checkpoint import CheckpointError
from lightning_cp.checkpoint.safe_load import allows_code, check_file
from lightning_cp.compat.torch_names import is_traceable_wrapper_subclass
from lightning_cp.engine.apply import Installed
from lightning_cp.strategies.ddp_buckets import (
    averaged_parameters,
    check_reduced,
    check_trained,
    omit_unused_warning,
)
from lightning_cp.strategies.mixin import ContextParallelMixin


class DDPMixin(ContextParallelMixin):
    """Shard the tokens of each sample over ring x ulysses ranks; replicate weights; average gradients over all ranks.

    Args: see `ContextParallelMixin`. Settings of Lightning's DDPStrategy and PyTorch's DDP are accepted too.
    """

    _kwargs_targets = (DistributedDataParallel,)
    _finds_unused = False  # True: chosen here, not by the user

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
            self._lightning._ddp_kwargs["find_unused_parameters"] = self._finds_unused = True
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

    def _follower(self, wrapper: nn.Module) -> Callable[[nn.Module], None]:
        assert isinstance(wrapper, DistributedDataParallel), "made by setup"
        if self._finds_unused:
            omit_unused_warning(wrapper)
        return partial(check_trained, averaged_parameters(wrapper))

    def _check_reduced(self) -> None:
        for wrapper in self._agreement.wrappers():
            if isinstance(wrapper, DistributedDataParallel):
                check_reduced(wrapper)
