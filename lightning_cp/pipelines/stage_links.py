"""Transfers between the stages of a transformer's blocks: outputs of a stage go to the next one, in order.

The first transfer with a key is preceded by the outputs' form. A stage that fails sends a mark in place of its outputs,
and receives and drops what the stage before it sends. So every stage completes its forwards, and learns of the failure.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.packet import Layout
from lightning_cp.comm.transfer import Pending, exchange
from lightning_cp.errors import PlanError
from lightning_cp.mesh import MeshGroups
from lightning_cp.pipelines.forms import Form, forget_oldest, unpickled_quietly
from lightning_cp.pipelines.marked_packets import empty_packet, failure_packet, packet_of, read_packet


class StageFailedError(Exception):
    """The stage before this one has failed."""


@dataclass(eq=False)
class StageLinks:
    """This rank's links to the previous and the next stage.

    Attributes:
        groups: the ranks that hold the stages, as a ring, in order.
        forms: by key, the forms of the outputs of all blocks before this stage.
        sent_forms: by key, the forms of the outputs of all blocks up to this stage.
    """

    groups: MeshGroups
    forms: dict[Hashable, list[Form]] = field(default_factory=dict)
    sent_forms: dict[Hashable, list[Form]] = field(default_factory=dict)
    _incoming: dict[Hashable, tuple[Tensor, Pending]] = field(default_factory=dict)
    _sent: list[Pending] = field(default_factory=list)

    def expect(self, keys: Sequence[Hashable]) -> None:
        """Start to receive the tensors of the next forwards, in order, so that transfers overlap with computation."""
        for key in keys:
            if self.groups.context_rank == 0 or key not in self.forms:
                return  # its form arrives first, in a message of its own
            if key not in self._incoming:
                self._incoming[key] = self._start_receive(key)

    def forget_oldest(self) -> None:
        """Forget the oldest forms. Ranks: all stages, see `forms.forget_oldest`."""
        forget_oldest(self.forms)
        forget_oldest(self.sent_forms)

    def receive(self, key: Hashable) -> list[Any]:
        """Receive the outputs of the last block before this stage.

        Returns: an output for each block before this stage; those of the other blocks are zeros that take no memory.
        Raises: StageFailedError: the previous stage has failed.
        """
        if key not in self.forms:
            forms = self._receive_object()
            if forms is None:
                raise StageFailedError
            self.forms[key] = forms
        buffer, pending = self._incoming.pop(key) if key in self._incoming else self._start_receive(key)
        pending.wait()
        *earlier, last = self.forms[key]
        tensors, has_failed = read_packet(buffer, last.layout)
        if has_failed:
            raise StageFailedError
        return [*map(zeros, earlier), last.filled(tensors)]

    def send(self, key: Hashable, own: Sequence[Form], tensors: Sequence[Tensor]) -> None:
        """Send the outputs of this stage's last block; before the first with this key, also their form.

        Args: own: forms of the outputs of this stage's blocks. tensors: tensors of the last of them.
        Raises: PlanError: the form differs from the previous one with this key; nothing was sent.
        """
        forms = [*self.forms.get(key, []), *own]
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
    def group(self) -> dist.ProcessGroup:
        """Process group of the stages."""
        assert self.groups.context is not None, "there are several stages"
        return self.groups.context

    def _start_receive(self, key: Hashable) -> tuple[Tensor, Pending]:
        form = self.forms[key][-1]
        buffer = empty_packet(form.layout, form.device)
        return buffer, exchange([], [(self.groups.context_rank - 1, buffer)], group=self.group)

    def _start_send(self, packet: Tensor) -> None:
        self._sent.append(exchange([(self.groups.context_rank + 1, packet)], [], group=self.group))

    def _send_object(self, value: Any) -> None:
        dist.send_object_list([value], group=self.group, group_dst=self.groups.context_rank + 1)

    def _receive_object(self) -> Any:
        received: list[Any] = [None]
        with unpickled_quietly():
            dist.recv_object_list(received, group=self.group, group_src=self.groups.context_rank - 1)
        return received[0]


def check_same(found: Layout, expected: Layout) -> None:
    """Raises: PlanError: a result has another layout than an earlier one with arguments of the same shapes."""
    if list(found) != list(expected):
        raise PlanError(
            f"a forward with arguments of the same shapes had results {list(expected)} before and {list(found)} now, "
            "so stages of blocks cannot exchange them: use pipe=1"
        )


def zeros(form: Form) -> Any:
    """Return a result of this form with zeros that take no memory."""
    return form.filled([torch.zeros((), dtype=x.dtype, device=form.device).expand(x.shape) for x in form.layout])
