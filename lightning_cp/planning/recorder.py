"""Record what a step does: its operators, its transfers and the memory of its tensors, in segments between marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.observer import Transfer
from lightning_cp.compat.torch_names import DispatchKey, TorchDispatchMode, is_fake, tree_iter, without_dispatch_modes
from lightning_cp.planning.flops import flops_of, moved_bytes
from lightning_cp.planning.memory import Span, StorageTracker
from lightning_cp.planning.step import Compute, Event, Start, Wait


@dataclass
class Segment:
    """What happens between two marks. Attributes: calls: into PyTorch. span: changes of memory."""

    name: str
    events: list[Event] = field(default_factory=list)
    calls: int = 0
    span: Span = field(default_factory=Span)
    numbers: dict[int, int] = field(default_factory=dict)  # of transfers: in the process -> in the segment


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operators of a step, those inside of this package's operators too, and its transfers.

    Use it as a context, and as the observer of transfers. Tensors may have storage or not. An operator on tensors with
    storage only computes them also inside of a `FakeTensorMode`, so that their values can be read.

    Attributes:
        segments: what was recorded; `mark` begins the next one.
        tracker: the memory.
        at_mark: called before a segment ends.
    """

    def __init__(self, links: Mapping[dist.ProcessGroup, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments: list[Segment] = []
        self.tracker = StorageTracker()
        self.at_mark: Callable[[], None] | None = None
        self._links, self._inside = links, 0
        self.mark("begin")

    def mark(self, name: str) -> None:
        """Begin a segment."""
        if self.at_mark is not None:
            self.at_mark()
        segment = Segment(name)
        self.segments.append(segment)
        self.tracker.span = segment.span

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "lightning_cp":
            self._inside += 1
            try:
                with self:  # the operator's body, instead of its fake
                    return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
            finally:
                self._inside -= 1
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if given and not any(map(is_fake, given)):
            with without_dispatch_modes():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._record(func, args, kwargs, given, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any) -> None:
        if func.namespace == "prim":  # asks a tensor without storage for its device
            return
        segment = self.segments[-1]
        segment.calls += 1
        if func.namespace == "c10d":
            return
        for x in tree_iter(result):
            if isinstance(x, Tensor):
                is_buffer = self._inside and x.element_size() == 1 and not x.dtype.is_floating_point and not given
                self.tracker.add(x, "buffers" if is_buffer else None)
        moved = moved_bytes(func, given, result)
        if moved:
            segment.events.append(Compute(func._schema.name, flops_of(func, args, kwargs, result), moved))

    def started(self, transfer: Transfer) -> None:
        """A transfer starts."""
        segment, mine = self.segments[-1], dist.get_rank(transfer.group)
        number = segment.numbers[transfer.number] = len(segment.numbers) + 1
        sent = sum(x.numel() * x.element_size() for peer, x in transfer.sent if peer != mine)
        segment.events.append(Start(number, self._links.get(transfer.group, "world"), sent))

    def waited(self, number: int) -> None:
        """The wait for a transfer is over."""
        segment = self.segments[-1]
        segment.events.append(Wait(segment.numbers[number]))

    def reduce(self, sent_bytes: int) -> None:
        """Record an all-reduce of gradients over all ranks that nothing here starts."""
        number = self.segments[-1].numbers[-1 - len(self.segments[-1].numbers)] = len(self.segments[-1].numbers) + 1
        self.segments[-1].events.append(Start(number, "world", sent_bytes))

    def wait_for_all(self) -> None:
        """Record that everything that has started is waited for."""
        self.segments[-1].events.append(Wait(None))

    def gathered(self, values: list[int], group: dist.ProcessGroup) -> list[list[int]]:
        """Answer for the other ranks, as if they had this rank's values."""
        return [values] * dist.get_world_size(group)
