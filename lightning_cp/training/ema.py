"""Keep an exponential moving average (EMA) of a module's weights.

`torch.optim.swa_utils.AveragedModel` is not used: it deep-copies the module, which FSDP2 refuses. It also averages
frozen weights, and averages half-precision weights in half precision, where small updates are rounded away.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_cp.compat.distributed_names import free_gathered
from lightning_cp.compat.torch_names import lerp_all_


class WeightAverage:
    """EMA of a module's trainable parameters; in float32 for float16 and bfloat16 parameters.

    Each rank keeps the EMA of its own parameters or shards. Parameters that are equal on all ranks have equal EMAs.
    Parameters that are frozen later are still averaged.

    Args:
        module: the module to average; its buffers are not averaged.
        decay: EMA decay, in [0, 1). It is warmed up: at step n the decay is at most (1 + n) / (10 + n).
        names: further parameters to average, although they are frozen now.
    """

    def __init__(self, module: nn.Module, decay: float = 0.999, *, names: Collection[str] = ()) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be at least 0 and below 1, for instance 0.999")
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        self.add_trained(module, names=names)

    def add_trained(self, module: nn.Module, *, names: Collection[str] = ()) -> None:
        """Start the EMA of parameters that train and have none yet, from their values. Call it before the step."""
        for name, p in module.named_parameters():
            if name not in self._average and (p.requires_grad or name in names):
                self._average[name] = _at_least_float32(p.detach()).clone()

    @torch.no_grad()
    def update(self, module: nn.Module, *, step: int, without: tuple[str, ...] = ()) -> None:
        """Update the EMA with the weights after a step.

        The EMA of a parameter that trains and has none yet starts from its value after this step; call `add_trained`
        before the step to start from the value before.

        Args:
            step: step number, counted from 1.
            without: beginnings of names; the EMA of these parameters, which the step has not trained, stays as it is.
        Raises: ValueError: an averaged parameter is no longer in the module.
        """
        self.add_trained(module)
        decay = min(self.decay, (1 + step) / (10 + step))
        parameters, names = self._parameters(module), [name for name in self._average if not name.startswith(without)]
        averages = [self._average[name] for name in names]
        lerp_all_(averages, [_at_least_float32(parameters[name].detach()) for name in names], 1 - decay)

    def _parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        parameters = dict(module.named_parameters())
        for name in self._average:
            if name not in parameters:
                raise ValueError(
                    f"{name} has an EMA and is no longer a weight of {type(module).__name__}: add and remove adapters "
                    "before the EMA starts"
                )
        return parameters

    @contextmanager
    def swapped_in(self, module: nn.Module) -> Iterator[None]:
        """Load the EMA weights into the module inside the context, and restore its own weights after it."""
        parameters = self._parameters(module)
        with torch.inference_mode(False):  # Trainer.test runs in it, where a DTensor cannot be detached
            original = {name: parameters[name].detach().clone() for name in self._average}
        try:
            _copy(self._average, parameters)
            _free_gathered(module)
            yield
        finally:
            _copy(original, parameters)
            _free_gathered(module)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the EMA weights by parameter name."""
        return dict(self._average)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load EMA weights from `state_dict`. Raises: KeyError, RuntimeError: names or shapes differ."""
        if state.keys() != self._average.keys():
            raise KeyError(
                f"the state and the module have different weights: {sorted(state.keys() ^ self._average.keys())[:5]}"
            )
        _copy(state, self._average)


def full_tensor(x: Tensor) -> Tensor:
    """Return the full tensor; a DTensor is gathered. Call it on every rank."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def gather_on_first_rank(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather sharded tensors one at a time; return them on the CPU on the first rank, {} on the others.

    Ranks: the whole world.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    gathered: dict[str, Tensor] = {}
    for name, x in state.items():
        full = full_tensor(x.detach())
        if is_first:
            gathered[name] = full.cpu()
    return gathered


@torch.no_grad()
def copy_full_tensor(value: Tensor, target: Tensor) -> None:
    """Copy a full tensor into a weight. If the weight is sharded, each rank copies its shard; no communication."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)


def _free_gathered(module: nn.Module) -> None:
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            free_gathered(inner)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _copy(source: dict[str, Tensor], target: dict[str, Tensor] | dict[str, nn.Parameter]) -> None:
    for name, value in source.items():
        copy_full_tensor(value, target[name])
