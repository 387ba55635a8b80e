"""Compute a model's outputs and gradients, and compare two sets of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

_T = TypeVar("_T")


def of_first_rank(compute: Callable[[], _T]) -> _T:
    """Compute what one process would on rank 0 only, and send it to the others: the ranks share a few cores."""
    found = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return cast("_T", found[0])


@contextmanager
def nothing_narrowed() -> Iterator[None]:
    """Context in which casts of models to float32 become casts to float64. Backward does it again, too.

    (`check_plan` has a mode for it, which reaches more functions, but is off in backward.)
    """
    to = Tensor.to

    @wraps(to)
    def wide(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return to(x, *args, **kwargs)

    try:
        with mock.patch.object(Tensor, "float", Tensor.double), mock.patch.object(Tensor, "to", wide):
            yield
    finally:
        FakeTensorMode.cache_clear()  # a compiler has stored results with these casts, also for other models


def outcome(model: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """All outputs, flat, and each parameter's gradient of a weighted sum of them."""
    model.zero_grad(set_to_none=True)
    with nothing_narrowed():
        outputs = model(**arguments, return_dict=False)
        out = torch.cat([x.flatten() for x in outputs if isinstance(x, Tensor)])
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        (out * weights).sum().backward()
    return out.detach(), {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def averaged(gradients: dict[str, Tensor | None], world: int) -> dict[str, Tensor | None]:
    """Average all gradients over the ranks, in place and by one collective."""
    there = [gradient for gradient in gradients.values() if gradient is not None]
    whole = torch.cat([gradient.flatten() for gradient in there])
    dist.all_reduce(whole)
    for gradient, mean in zip(there, whole.split([x.numel() for x in there]), strict=True):
        gradient.copy_(mean.view_as(gradient) / world)
    return gradients


def worst(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    assert found.keys() == expected.keys()
    largest = 0.0
    for name, reference in expected.items():
        gradient = found[name]
        assert (gradient is None) == (reference is None), name
        if gradient is not None and reference is not None:
            scale = max(float(reference.abs().max()), 1e-3)
            largest = max(largest, float((gradient - reference).abs().max()) / scale)
    return largest
