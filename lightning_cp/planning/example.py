"""Plan the degrees of a strategy from a transformer and an example of its arguments."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp.nest import of_type
from lightning_cp.planning.degrees import Degrees, choose_degrees, device_of
from lightning_cp.planning.models import PlannedModel
from lightning_cp.planning.request import Request
from lightning_cp.strategies.auto_degrees import Example


def plan_example(example: Example) -> Degrees:
    """Choose the degrees of a strategy. Equal questions in one process are answered once.

    Raises: ValueError: see `choose_degrees`.
    """
    fixed: dict[str, object] = {
        "sharded": example.sharded,
        "rotate_method": example.rotate_method,
        "checkpointing": "none",  # its own is in the module
    }
    if example.data is not None:
        fixed["data"] = example.data
    device = device_of(example.gpu, example.node_ranks)
    inputs = _by_name(example.transformer, example.arguments)
    if not _samples(inputs):
        raise ValueError("example_input_array must hold at least one sample, got a batch of 0")
    dtype = example.dtype or _dtype_of(example.transformer)
    model = planned(example.transformer, inputs)
    cast, rule, samples = example.autocast, example.plan, _samples(inputs)
    request = Request(model, example.ranks, device, dtype=dtype, autocast=cast, batch_size=samples, plan=rule)
    forward = _form(example.transformer), _described(inputs)
    asked = (example.ranks, fixed, device, dtype, cast, repr(rule), forward)
    key = hashlib.blake2b(repr(asked).encode(), digest_size=16).hexdigest()
    return _answer(_Question(key, lambda: choose_degrees(lambda data: request, example.ranks, fixed)))


@dataclass(frozen=True)
class _Question:
    """A question; equal keys have equal answers."""

    key: str
    answer: Callable[[], Degrees] = field(compare=False)


@lru_cache(maxsize=8)
def _answer(question: _Question) -> Degrees:
    if dist.is_initialized():
        raise ValueError(
            "this process already has a process group, in which nothing can be dry-run: let the strategy connect the "
            "ranks, or give the degrees by hand (ring=..., ulysses=...)"
        )
    return question.answer()


def planned(transformer: nn.Module, inputs: Mapping[str, Any], tokens: int | None = None) -> PlannedModel:
    """Return a copy of a transformer without weights, to plan with these arguments."""
    memo: dict[int, Any] = {
        id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad) for x in transformer.parameters()
    }
    empty = copy.deepcopy(transformer, memo)
    heads = getattr(getattr(transformer, "config", None), "num_attention_heads", None)
    return PlannedModel(
        type(transformer).__name__,
        lambda: copy.deepcopy(empty),
        inputs,
        heads=heads if isinstance(heads, int) else None,
        tokens=tokens,
    )


def _by_name(transformer: nn.Module, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a forward by name. Raises: ValueError: they are not those of this forward."""
    values = (arguments,) if isinstance(arguments, Tensor) else arguments
    try:
        signature = inspect.signature(transformer.forward)
        bound = signature.bind(**values) if isinstance(values, Mapping) else signature.bind(*values)
    except TypeError as error:
        raise ValueError(
            f"example_input_array must hold the arguments of {type(transformer).__name__}.forward, as a tuple or a "
            f"dict: {error}"
        ) from None
    return dict(bound.arguments)


def _dtype_of(transformer: nn.Module) -> torch.dtype:
    """Return the dtype of most weights."""
    counts: Counter[torch.dtype] = Counter()
    for x in transformer.parameters():
        counts[x.dtype] += x.numel() if x.is_floating_point() else 0
    return counts.most_common(1)[0][0]


def _samples(inputs: Mapping[str, Any]) -> int:
    first = next(of_type(Tensor, dict(inputs)), None)
    return 1 if first is None or not first.dim() else len(first)


def _form(transformer: nn.Module) -> list[Any]:
    """Return what a dry run depends on: class, weights, and which blocks are checkpointed."""
    weights = [(name, tuple(x.shape), x.dtype, x.requires_grad) for name, x in transformer.named_parameters()]
    checkpointed = [name for name, x in transformer.named_modules() if getattr(x, "gradient_checkpointing", False)]
    return [type(transformer).__qualname__, dict(getattr(transformer, "config", {})), weights, checkpointed]


def _described(value: Any) -> Any:
    """Return forms of tensors in place of their values."""
    if isinstance(value, Mapping):
        return {name: _described(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_described(x) for x in value]
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
