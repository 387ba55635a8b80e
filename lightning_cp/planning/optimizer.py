"""Record the optimizer's step. It depends on the forms of the weights only, so equal ones are recorded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from lightning_cp.device_profile import device_type
from lightning_cp.nest import of_type
from lightning_cp.planning.recorder import Recorder, Segment

OPTIMIZER = "optimizer"  # name of the optimizer's part
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Form:
    """The form of a weight. Attributes: storage_bytes: with the padding of a shard."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage_bytes: int

    @classmethod
    def of(cls, x: Tensor) -> Form:
        """Return the form of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype, x.untyped_storage().nbytes())

    def make(self) -> nn.Parameter:
        """Return a weight of this form."""
        storage = torch.empty(self.storage_bytes // self.dtype.itemsize, dtype=self.dtype)
        return nn.Parameter(storage.as_strided(self.shape, self.stride))


@dataclass(frozen=True)
class OptimizerStep:
    """What an optimizer's step does. Attributes: state_bytes: memory of its state. segment: its events and memory."""

    state_bytes: int
    segment: Segment


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make AdamW, with its default for the device: on a GPU it computes all weights at once."""
    return torch.optim.AdamW(parameters, foreach=device_type(parameters[0]) == "cuda")


def optimizer_step(weights: Sequence[Tensor], make: MakeOptimizer, *, kind: str, fake: bool) -> OptimizerStep:
    """Record a step of the optimizer of these weights, in which gradients are freed.

    Args: kind: kind of the device. fake: the weights have no storage.
    """
    return _recorded(tuple(map(Form.of, weights)), make, kind, fake)


@lru_cache(maxsize=8)
def _recorded(forms: tuple[Form, ...], make: MakeOptimizer, kind: str, fake: bool) -> OptimizerStep:
    weights = [form.make() for form in forms]
    optimizer = make(weights)
    with Recorder({}):  # its state exists after the first step
        for x in weights:
            x.grad = torch.empty_like(x)
        optimizer.step()
    recorder = Recorder({})
    _count(recorder, weights, "weights")
    _count(recorder, optimizer.state, "optimizer")
    _count(recorder, [x.grad for x in weights], "gradients")
    recorder.mark(OPTIMIZER)
    with recorder:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    recorder.mark("end")  # memory that is freed later does not count
    state_bytes = sum(x.untyped_storage().nbytes() for x in of_type(Tensor, optimizer.state))
    return OptimizerStep(state_bytes, recorder.segments[-2])


def _count(recorder: Recorder, value: object, category: str) -> None:
    for x in of_type(Tensor, value):
        recorder.tracker.add(x, category)
