"""Transfers between the stages of a transformer's blocks: outputs of a stage go to the next one, in order.

The first transfer with a key is preceded by the outputs' form. A stage that fails sends a mark in place of its outputs,
and receives and drops what the stage before it sends. So every stage completes its forwards, and learns of the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.packet import Layout, Piece, pack_tensors, packet_bytes, unpack_tensors
from lightning_cp.comm.transfer import Pending, exchange
from lightning_cp.errors import PlanError
from lightning_cp.mesh.sample_groups import StageGroup
from lightning_cp.pipelines.result_layout import Form, forget_oldest, unpickled_quietly

_MARK = Piece((1,), torch.uint8)  # the end of a packet: 1 if a stage has failed, and the packet has no values


def empty_packet(layout: Layout, device: torch.device) -> Tensor:
    """Allocate a packet for tensors of this layout, and the mark."""
    return torch.empty(packet_bytes([*layout, _MARK]), dtype=torch.uint8, device=device)


def packet_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Copy tensors into a packet."""
    return pack_tensors([*tensors, torch.zeros(1, dtype=torch.uint8, device=device)])


def failure_packet(layout: Layout, device: torch.device) -> Tensor:
    """Return the packet of a stage that has failed, in place of tensors of this layout."""
    packet = empty_packet(layout, device)
    unpack_tensors(packet, [*layout, _MARK])[-1].fill_(1)
    return packet


def read_packet(packet: Tensor, layout: Layout) -> tuple[list[Tensor], bool]:
    """Return views of the tensors in a received packet, and True if a stage has failed.

    Synchronises the host once: it must know whether to compute. A message between hosts would wait as long.
    """
    *tensors, mark = unpack_tensors(packet, [*layout, _MARK])
    return tensors, bool(mark.item())


class StageFailedError(Exception):
    """The stage before this one has failed."""


@dataclass(eq=False)
class StageLinks:
    """This rank's links to the previous and the next stage.

    Attributes:
        stages: the ranks that hold the stages.
        control: a gloo group that contains them, for forms. (In an NCCL group, sending an object creates a communicator
            for the pair of ranks, and both hosts wait.)
        forms: by key, the forms of the outputs of all blocks before this stage.
        sent_forms: by key, the forms of the outputs of all blocks up to this stage.
    """

    stages: StageGroup
    control: dist.ProcessGroup
    forms: dict[Hashable, list[Form]] = field(default_factory=dict)
    sent_forms: dict[Hashable, list[Form]] = field(default_factory=dict)
    _incoming: dict[Hashable, tuple[Tensor, Pending]] = field(default_factory=dict)
    _sent: list[Pending] = field(default_factory=list)
    _following: Hashable = None
    _start_results: Callable[[], None] = lambda: None

    def expect(self, key: Hashable, following: Hashable, start_results: Callable[[], None]) -> None:
        """Prepare for a forward: start to receive its tensors, if that has not begun.

        The order of transfers is the same on all ranks (see docs/cuda.md): the tensors of this forward, results of
        earlier forwards, the tensors of the following forward, which are received while this one is computed.

        Args:
            key: key of this forward. following: key of the next forward; None for the last one of a call.
            start_results: starts the transfers of results of earlier forwards.
        """
        self._following, self._start_results = following, start_results
        self._expect(key)

    @property
    def is_ahead(self) -> bool:
        """True if this rank has started to receive the following forward's tensors, or does not receive any."""
        return self.stages.stage == 0 or self._following is None or self._following in self._incoming

    def _expect(self, key: Hashable) -> None:
        """Start to receive tensors, if their form is known. A new form arrives first, in a message of its own."""
        if key in self.forms and key not in self._incoming:
            self._incoming[key] = self._start_receive(key)

    def forget_oldest(self) -> None:
        """Forget the oldest forms. Ranks: all stages, see `result_layout.forget_oldest`."""
        forget_oldest(self.forms)
        forget_oldest(self.sent_forms)

    def receive(self, key: Hashable) -> list[Any]:
        """Receive the outputs of the last block before this stage.

        Returns: an output for each block before this stage; those of the other blocks are zeros that take no memory.
        Raises: StageFailedError: the previous stage has failed.
        """
        if key not in self.forms:
            forms = receive_object(dist.get_global_rank(self.group, self.stages.stage - 1), self.control)
            if forms is None:
                self._start_results()
                raise StageFailedError
            self.forms[key] = forms
        self._expect(key)
        self._start_results()
        self._expect(self._following)
        buffer, pending = self._incoming.pop(key)
        pending.wait()
        *earlier, last = self.forms[key]
        tensors, has_failed = read_packet(buffer, last.layout)
        if has_failed:
            raise StageFailedError
        return [*map(zeros, earlier), last.filled(tensors)]

    def send(self, key: Hashable, local_forms: Sequence[Form], tensors: Sequence[Tensor]) -> None:
        """Send the outputs of this stage's last block; before the first with this key, also their form.

        Args: local_forms: forms of the outputs of this stage's blocks. tensors: tensors of the last of them.
        Raises: PlanError: the form differs from the previous one with this key; nothing was sent.
        """
        forms = [*self.forms.get(key, []), *local_forms]
        if key in self.sent_forms:
            check_same(forms[-1].layout, self.sent_forms[key][-1].layout)
        else:
            self.sent_forms[key] = forms
            self._send_object(forms)
        self._start_send(packet_of(tensors, forms[-1].device))

    def send_failure(self, key: Hashable) -> None:
        """Send a mark in place of the outputs."""
        if key not in self.sent_forms:
            self._send_object(None)
            return
        form = self.sent_forms[key][-1]
        self._start_send(failure_packet(form.layout, form.device))

    def finish(self, *, newest: int = 0) -> None:
        """Wait until everything is sent, except the `newest` transfers. Ranks: the next stage receives it."""
        while len(self._sent) > newest:
            self._sent.pop(0).wait()

    @property
    def later_stages(self) -> int:
        """Number of stages after this one."""
        return self.stages.num_stages - 1 - self.stages.stage

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the stages."""
        assert self.stages.group is not None, "there are several stages"
        return self.stages.group

    def _start_receive(self, key: Hashable) -> tuple[Tensor, Pending]:
        form = self.forms[key][-1]
        buffer = empty_packet(form.layout, form.device)
        return buffer, exchange([], [(self.stages.stage - 1, buffer)], group=self.group)

    def _start_send(self, packet: Tensor) -> None:
        self._sent.append(exchange([(self.stages.stage + 1, packet)], [], group=self.group))

    def _send_object(self, value: Any) -> None:
        send_object(value, dist.get_global_rank(self.group, self.stages.stage + 1), self.control)


def send_object(value: Any, target: int, control: dist.ProcessGroup) -> None:
    """Send an object to the global rank `target`, in a gloo group. Blocks the host until it is received."""
    dist.send_object_list([value], dst=target, group=control)


def receive_object(source: int, control: dist.ProcessGroup) -> Any:
    """Receive an object from the global rank `source`, in a gloo group."""
    received: list[Any] = [None]
    with unpickled_quietly():
        dist.recv_object_list(received, src=source, group=control)
    return received[0]


def check_same(actual: Layout, expected: Layout) -> None:
    """Raises: PlanError: a result has another layout than an earlier one with arguments of the same shapes."""
    if list(actual) != list(expected):
        raise PlanError(
            f"a forward with arguments of the same shapes had results {list(expected)} before and {list(actual)} now, "
            "so stages of blocks cannot exchange them: use pipe=1"
        )


def zeros(form: Form) -> Any:
    """Return a result of this form with zeros that take no memory."""
    return form.filled([torch.zeros((), dtype=x.dtype, device=form.device).expand(x.shape) for x in form.layout])
