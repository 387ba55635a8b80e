"""Record what a step does: operators with their floating-point operations, transfers, and the memory of tensors.

Events are in segments between marks. Operations follow from formulas of attention and matrix products, and otherwise
from the number of elements. PyTorch's own formulas of attention expect [b, h, s, d], and read the tensors of other
layouts wrongly.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_cp.comm.transfer import Transfer
from lightning_cp.compat.torch_names import (
    TorchDispatchMode,
    address_of,
    is_fake,
    run_body,
    schema_of,
    tree_iter,
    without_dispatch_modes,
)
from lightning_cp.planning.step import CATEGORIES, Compute, Event, Start, Wait

Bytes = dict[str, int]  # by category


@dataclass
class Span:
    """Memory between two marks of a step, relative to its begin.

    Attributes: grown: at its end. peak: at the moment of its highest sum.
    """

    grown: Bytes = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    peak: Bytes = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))

    def change(self, category: str, change: int) -> None:
        """Allocate memory, or free it if `change` is negative."""
        self.grown[category] += change
        if change > 0 and sum(self.grown.values()) > sum(self.peak.values()):
            self.peak = dict(self.grown)


class StorageTracker:
    """Follow the storages of tensors, with or without memory of their own.

    Attributes:
        span: what is counted now. Exchange it at a mark.
        category: category of storages that are added without one.
    """

    def __init__(self) -> None:
        self.span, self.category = Span(), "activations"
        self._live: dict[int, tuple[weakref.ref[object], int, str]] = {}
        self._watched: dict[int, tuple[int, ...]] = {}  # the first storage of a unit -> all its storages

    def add(self, x: Tensor, category: str | None = None) -> None:
        """Count the storage of a tensor, unless it is counted already, or on the meta device."""
        if x.is_meta:
            return
        storage = x.untyped_storage()
        key = address_of(storage)
        if key in self._live:
            return
        size, category = storage.nbytes(), category or self.category
        self._live[key] = weakref.ref(storage, lambda _: self._free(key)), size, category
        self.span.change(category, size)

    def move(self, x: Tensor, category: str) -> None:
        """Count the storage of a tensor in another category from now on."""
        key = address_of(x.untyped_storage())
        if key not in self._live:
            return self.add(x, category)
        reference, size, before = self._live[key]
        if before != category:
            self.span.change(before, -size)
            self.span.change(category, size)
            self._live[key] = reference, size, category
        return None

    def watch(self, unit: Sequence[Tensor]) -> None:
        """Follow later changes of the size of tensors' storages, which no operator makes. All change together."""
        keys = tuple(address_of(x.untyped_storage()) for x in unit)
        self._watched[keys[0]] = keys

    def follow_resizes(self) -> None:
        """Count the sizes that watched storages have now, those that shrank first."""
        changes = []
        for first, keys in self._watched.items():
            if self._resized(first) is None:
                continue
            for key in keys:
                now = self._resized(key)
                if now is not None:
                    reference, size, category = self._live[key]
                    changes.append((now - size, category))
                    self._live[key] = reference, now, category
        for change, category in sorted(changes):
            self.span.change(category, change)

    def _resized(self, key: int) -> int | None:
        """Return the size of a storage if it has changed."""
        reference, size, _ = self._live[key]
        storage: Any = reference()
        now: int = size if storage is None else storage.nbytes()
        return None if now == size else now

    def reserve(self, category: str, size: int) -> None:
        """Count memory that no tensor of the step has."""
        self.span.change(category, size)

    def _free(self, key: int) -> None:
        _, size, category = self._live.pop(key)
        self._watched.pop(key, None)
        self.span.change(category, -size)


WORLD, WEIGHTS = "world", "weights"  # links of all ranks, and of those that share the weights of a sample
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}  # indices of the two factors
_VIEWS = ("detach", "_unsafe_view", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided", "alias")
_READS = ("_local_scalar_dense",)  # of AdamW's step counters, which are in host memory


@dataclass
class Segment:
    """What happens between two marks. Attributes: calls: into PyTorch. span: changes of memory."""

    name: str
    events: list[Event] = field(default_factory=list)
    calls: int = 0
    span: Span = field(default_factory=Span)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operators of a step, those inside of this package's operators too, and its transfers.

    Use it as a context, and as the observer of transfers. Tensors may have storage or not. An operator on tensors with
    storage only computes them also inside of a `FakeTensorMode`, so that their values can be read.

    Attributes:
        segments: what was recorded; `mark` begins the next one.
        tracker: the memory.
        at_mark: called before a segment ends.
        weights_link: link of FSDP2's transfers, which gather the next weights ahead.
    """

    def __init__(self, links: Mapping[dist.ProcessGroup, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments: list[Segment] = []
        self.tracker = StorageTracker()
        self.at_mark: Callable[[], None] | None = None
        self.weights_link = WORLD
        self._links, self._inside = links, 0
        self._started = self._before = 0  # transfers so far, and before this segment
        self._numbers: dict[int, int] = {}  # of transfers: in the process -> in the step
        self._gathers: deque[int] = deque()  # of FSDP2, which waits for them in order
        self.mark("begin")

    def mark(self, name: str) -> None:
        """Begin a segment."""
        if self.at_mark is not None:
            self.at_mark()
        segment = Segment(name)
        self.segments.append(segment)
        self.tracker.span, self._before = segment.span, self._started

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks a tensor without storage for its device, very often
            return func(*args, **kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # their operators on shards come here again
        if func.namespace == "lightning_cp":
            self._inside += 1
            try:
                with self:  # the operator's body, instead of its fake
                    return run_body(func, *args, **kwargs)
            finally:
                self._inside -= 1
        self.tracker.follow_resizes()
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        are_fake = [is_fake(x) for x in given]
        if given and not any(are_fake):
            with without_dispatch_modes():
                result = func(*args, **kwargs)
        elif all(are_fake) and func.namespace == "aten" and _changes_lists_in_place(func):
            result = None  # nothing that is recorded; torch would look at each tensor of each list
        else:
            result = func(*args, **kwargs)
        self._record(func, args, kwargs, given, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any) -> None:
        segment = self.segments[-1]
        segment.calls += 1
        if func.namespace == "c10d":
            if not self._inside:
                self._record_collective(func, args)
            return
        if func.namespace == "fsdp":
            self._record_fsdp(func, given, result)
        results = [x for x in tree_iter(result) if isinstance(x, Tensor)]
        for x in results:
            is_buffer = self._inside and x.element_size() == 1 and not x.dtype.is_floating_point and not given
            self.tracker.add(x, "buffers" if is_buffer else None)
        moved = 0 if is_view(func) else sum(x.numel() * x.element_size() for x in (*given, *results))
        if moved:
            segment.events.append(Compute(schema_of(func).name, flops_of(func, args, kwargs, result), moved))

    def _record_collective(self, func: Any, args: Any) -> None:
        """Record FSDP2's all-gathers and reduce-scatters. Those of this package are reported by `started`."""
        name = schema_of(func).name
        if name not in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            return  # the sends of a halo exchange, for example, have lists of tensors
        others = abs(args[0].numel() - args[1].numel()) * args[0].element_size()  # all shards but this rank's
        if name == "c10d::_allgather_base_":
            self._gathers.append(self._start(self.weights_link, others, of_shards=True, is_ahead=True))
        else:
            self._start(self.weights_link, others, of_shards=True)

    def _record_fsdp(self, func: Any, given: list[Tensor], result: Any) -> None:
        """Follow the weights of a unit, which FSDP2 allocates and frees by resizing them, and the buffers it sends."""
        if schema_of(func).name == "fsdp::split_with_sizes_copy":
            self._wait(self._gathers.popleft())
            for x in given[1:]:
                self.tracker.move(x, "weights")
            self.tracker.watch(given[1:])
        else:  # all_gather_copy_in returns its buffers, chunk_cat gets one
            for x in (*tree_iter(result), given[-1]):
                if isinstance(x, Tensor):
                    self.tracker.move(x, "buffers")

    def _start(self, link: str, sent_bytes: int, *, of_shards: bool = False, is_ahead: bool = False) -> int:
        self._started += 1
        number = self._started - self._before
        self.segments[-1].events.append(Start(number, link, sent_bytes, of_shards, is_ahead))
        return self._started

    def _wait(self, started: int) -> None:
        self.segments[-1].events.append(Wait(started - self._before))

    def started(self, transfer: Transfer) -> None:
        """A transfer starts."""
        mine = dist.get_rank(transfer.group)
        sent = sum(x.numel() * x.element_size() for peer, x in transfer.sent if peer != mine)
        self._numbers[transfer.number] = self._start(self._links.get(transfer.group, WORLD), sent)

    def waited(self, number: int) -> None:
        """The wait for a transfer is over."""
        self._wait(self._numbers[number])

    def reduce(self, sent_bytes: int) -> None:
        """Record an all-reduce of gradients over all ranks that nothing here starts."""
        self._start(WORLD, sent_bytes)

    def wait_for_all(self) -> None:
        """Record that everything that has started is waited for."""
        self.segments[-1].events.append(Wait(None))

    def gathered(self, values: list[int], group: dist.ProcessGroup) -> list[list[int]]:
        """Answer for the other ranks, as if they had this rank's values."""
        return [values] * dist.get_world_size(group)


def _changes_lists_in_place(func: Any) -> bool:
    name: str = schema_of(func).name
    return name.startswith("aten::_foreach_") and name.endswith("_")


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the operations of a call that is no view: a multiplication and an addition are two."""
    name = schema_of(func).name.partition("::")[2]
    if name in _PRODUCTS:
        a, b = (args[index] for index in _PRODUCTS[name])
        return int(2 * a.numel() * b.shape[-1])
    if "attention" in name:
        arguments = dict(zip((x.name for x in schema_of(func).arguments), args, strict=False)) | {**kwargs}
        return _attention(name, args, is_causal=arguments.get("is_causal") is True)
    if name == "convolution":
        x, weight, *_ = args
        kernel = prod(weight.shape[1:])
        transposed = bool(args[6])
        return int(2 * kernel * (x.numel() // x.shape[1] * weight.shape[0] if transposed else result.numel()))
    if name == "convolution_backward":
        grad, x, weight = args[:3]
        outputs = x.numel() // x.shape[1] * weight.shape[0] if args[7] else grad.numel()
        return int(2 * prod(weight.shape[1:]) * outputs * sum(bool(x) for x in args[10][:2]))
    return max((x.numel() for x in tree_iter(result) if isinstance(x, Tensor)), default=0)


def _attention(name: str, args: Sequence[Any], *, is_causal: bool) -> int:
    """Two products of [queries, keys] in forward, and five in backward, of which causality leaves about a half."""
    is_backward = "backward" in name
    q, k, v = args[1:4] if is_backward else args[:3]
    tokens_first = name.startswith("_flash_attention")  # [b, s, h, d], others [b, h, s, d]
    b, h, sq, d = (q.shape[i] for i in ((0, 2, 1, 3) if tokens_first else (0, 1, 2, 3)))
    sk = k.shape[1 if tokens_first else 2]
    widths = 3 * d + 2 * v.shape[-1] if is_backward else d + v.shape[-1]
    return int(2 * b * h * sq * sk * widths) // (2 if is_causal else 1)


def is_view(func: Any) -> bool:
    """Return True if an operator moves no data on the device: its result shares memory, or is not written."""
    schema = schema_of(func)
    name = schema.name.partition("::")[2]
    if name in _VIEWS or name in _READS:
        return True
    aliases = [x.alias_info for x in schema.returns if x.alias_info is not None]
    return bool(aliases) and not any(x.is_write for x in aliases)
