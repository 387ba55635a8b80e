"""Choose the degrees of a run: of a strategy from an example of its transformer's arguments, or of a training run."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp.nest import of_type
from lightning_cp.planning.devices import DEVICES, GB, Device, name_in_table
from lightning_cp.planning.layouts import layouts
from lightning_cp.planning.models import PlannedModel, heads_of
from lightning_cp.planning.search import OF_EVERY_LAYOUT, Request, closest, ranked, search, why
from lightning_cp.strategies.auto_degrees import Example


@dataclass(frozen=True)
class Degrees:
    """The chosen degrees. Attributes: reason: one line for the log, which begins with the degrees."""

    ring: int
    ulysses: int
    reason: str


def choose_degrees(request_of: Callable[[int], Request | None], ranks: int, fixed: dict[str, object]) -> Degrees:
    """Search the degrees that the settings allow.

    Args:
        request_of: returns the request for a number of data ranks; None: the batch cannot be divided over them.
        fixed: fields of `Layout` that are not changed, with their values.
    Raises: ValueError: no degrees are possible, nothing fits in memory, the model has no plan, or its forward cannot be
        traced.
    """
    results, problems = [], []
    for data in sorted({x.data for x in layouts(ranks, "train", fixed)}, reverse=True):
        request = request_of(data)
        if request is None:
            problems.append(f"the batch cannot be divided over {data} data ranks")
            continue
        try:
            results.append(search(replace(request, fixed={**fixed, "data": data})))
        except OF_EVERY_LAYOUT:
            raise
        except ValueError as error:
            problems.append(str(error))
    requests = {choice.layout: x.request for x in results for choice in x.choices}
    if requests:
        choices, equal = ranked(choice for x in results for choice in x.choices)
        best = choices[0].layout
        reason = why(choices, equal, requests[best]).partition(": ")[2]
        return Degrees(best.ring, best.ulysses, f"ring={best.ring} ulysses={best.ulysses}: {ranks} ranks; {reason}")
    if not results:
        given = "" if problems else f" with {', '.join(f'{name}={value}' for name, value in fixed.items())}"
        reasons = f": {'; '.join(dict.fromkeys(problems))}" if problems else ""
        raise ValueError(f"no degrees are possible on {ranks} ranks{given}{reasons}")
    raise ValueError(min(results, key=lambda x: closest(x.excluded).needs_bytes).reason)


def device_of(gpu: tuple[str, int] | None, node_ranks: int) -> Device:
    """Return a device of the table by the name that CUDA reports.

    Args: gpu: name, and bytes of memory; None: the CPU. node_ranks: ranks of a node.
    Raises: ValueError: the GPU is not in the table.
    """
    if gpu is None:
        return replace(DEVICES["cpu"], node_ranks=node_ranks)
    name, memory = gpu
    found = name_in_table(name)
    if found is None:
        known = ", ".join(device.name for device in DEVICES.values())
        raise ValueError(
            f"the figures of {name} are not known, only those of {known}: set the degrees by hand; lightning-cp plan "
            "proposes them with figures that you give"
        )
    return replace(DEVICES[found], memory_gb=memory / GB, node_ranks=node_ranks)


def plan_example(example: Example) -> Degrees:
    """Choose the degrees of a strategy.

    Raises: ValueError: there is a process group, or see `choose_degrees`.
    """
    if dist.is_initialized():
        raise ValueError(
            "this process already has a process group, in which nothing can be dry-run: let the strategy connect the "
            "ranks, or give the degrees by hand (ring=..., ulysses=...)"
        )
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
    request = Request(
        model,
        example.ranks,
        device,
        dtype=dtype,
        autocast=example.autocast,
        batch_size=_samples(inputs),
        plan=example.plan,
        mlp_tiles=example.mlp_tiles,
    )
    return choose_degrees(lambda data: request, example.ranks, fixed)


def planned(transformer: nn.Module, inputs: Mapping[str, Any], tokens: int | None = None) -> PlannedModel:
    """Return a copy of a transformer without weights, to plan with these arguments."""
    memo: dict[int, Any] = {
        id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad) for x in transformer.parameters()
    }
    empty = copy.deepcopy(transformer, memo)
    config = getattr(transformer, "config", None)  # of diffusers, or of another library
    heads = heads_of(config if isinstance(config, Mapping) else getattr(config, "__dict__", {}))
    return PlannedModel(type(transformer).__name__, lambda: copy.deepcopy(empty), inputs, heads, tokens)


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
