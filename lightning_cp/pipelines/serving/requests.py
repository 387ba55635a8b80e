"""Messages between the ranks of `follow`: plain data only, without pickle, sent over the job's process groups."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.lost_connections import raise_if_lost
from lightning_cp.comm.packet import Piece, pack_tensors, unpack_tensors
from lightning_cp.pipelines.serving.plain_data import DTYPES, PlainData, bytes_tensor

_LONGEST_POLL_S = 0.02
_HEADER_BYTES = 8  # length of the field with the header's size


class Requests:
    """Messages of one rank to all others of a process group.

    Args:
        group: gloo group; None: there is no other rank.
        source: global rank of the sender.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, source: int = 0) -> None:
        self._group, self._source = group, source

    def send(self, fields: Mapping[str, Any], arguments: PlainData) -> None:
        """Send a message to all other ranks, and wait until they read it. Ranks: the sender; the others call `receive`.

        Args: fields: plain values of JSON. arguments: arguments or results of a call.
        Raises: CallFailedError: another rank has exited.
        """
        self.start_send(fields, arguments)()

    def start_send(self, fields: Mapping[str, Any], arguments: PlainData) -> Callable[[], None]:
        """Start to send a message. Returns: a function that waits until it is read. See `send`."""
        if self._group is None:
            return lambda: None
        data = bytes_tensor(to_bytes(fields, arguments))
        when = f"with a message of rank {self._source}"
        with _naming_lost_ranks(when):
            parts = (torch.tensor([data.numel()]), data)
            works: list[Any] = [dist.broadcast(x, self._source, group=self._group, async_op=True) for x in parts]

        def wait() -> None:
            with _naming_lost_ranks(when):
                for work in works:
                    work.wait()

        return wait

    def receive(self, meanwhile: Callable[[], None] | None = None) -> tuple[dict[str, Any], PlainData]:
        """Wait for a message. See `Incoming.read`."""
        return self.start_receive().read(meanwhile)

    def start_receive(self) -> Incoming:
        """Start to receive the next message. Read it before the next one is received."""
        assert self._group is not None, "only a group has messages"
        return Incoming(self._group, self._source)


class Incoming:
    """A message that another rank sends, or will send."""

    def __init__(self, group: dist.ProcessGroup, source: int) -> None:
        self._group, self._source = group, source
        self._data: Tensor | None = None
        self._size = torch.zeros(1, dtype=torch.int64)
        with self._naming_lost_ranks():
            self._work: Any = dist.broadcast(self._size, src=source, group=group, async_op=True)

    def has_arrived(self) -> bool:
        """Return True once `read` does not have to wait."""
        return bool(self._work.is_completed())

    def read(self, meanwhile: Callable[[], None] | None = None) -> tuple[dict[str, Any], PlainData]:
        """Wait for the message; again, return it again. The wait can be interrupted, and the stall watch ignores it.

        Args: meanwhile: function to call again and again until the message arrives.
        Raises: CallFailedError: the sender has exited.
        """
        if self._data is None:
            with self._naming_lost_ranks():
                self._data = self._received(meanwhile)
        return from_bytes(self._data.numpy().tobytes())

    def _received(self, meanwhile: Callable[[], None] | None) -> Tensor:
        poll_s = 0.0005
        while not self._work.is_completed():
            if meanwhile is not None:
                meanwhile()
            time.sleep(poll_s)
            poll_s = min(_LONGEST_POLL_S, 1.2 * poll_s)
        self._work.wait()
        data = torch.empty(int(self._size), dtype=torch.uint8)
        dist.broadcast(data, src=self._source, group=self._group)
        return data

    def _naming_lost_ranks(self) -> AbstractContextManager[None]:
        return _naming_lost_ranks(f"while this rank waited for a message of rank {self._source}")


@contextmanager
def _naming_lost_ranks(when: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise_if_lost(error, when)
        raise


def to_bytes(fields: Mapping[str, Any], arguments: PlainData) -> bytes:
    """Encode a request: the size of a JSON header, the header, the bytes of all tensors."""
    layout = [(list(x.shape), str(x.dtype)) for x in arguments.tensors]
    header = json.dumps({"fields": dict(fields), "tree": arguments.tree, "layout": layout}).encode()
    packed = pack_tensors(arguments.tensors).numpy().tobytes() if arguments.tensors else b""
    return len(header).to_bytes(_HEADER_BYTES) + header + packed


def from_bytes(data: bytes) -> tuple[dict[str, Any], PlainData]:
    """Decode a request of `to_bytes`."""
    start = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES])
    header = json.loads(data[_HEADER_BYTES:start])
    layout = [Piece(tuple(shape), DTYPES[dtype]) for shape, dtype in header["layout"]]
    return header["fields"], PlainData(header["tree"], unpack_tensors(bytes_tensor(data[start:]), layout))
