"""Requests from rank 0 to the ranks that follow it: plain data only, signed, sent over the job's process group."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.comm.packet import Piece, pack, unpack
from lightning_cp.job_secret import signed, verified
from lightning_cp.lost_connections import raise_if_lost
from lightning_cp.pipelines.plain_data import DTYPES, PlainData, bytes_tensor

_LONGEST_POLL_S = 0.02
_HEADER_BYTES = 8  # length of the field with the header's size


class Requests:
    """Requests of rank 0 on one process group. Both sides count them: a request cannot be repeated or left out.

    Args: group: its first rank sends; None: there is no other rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._number = group, 0

    def send(self, fields: Mapping[str, Any], arguments: PlainData) -> None:
        """Send a request to all other ranks. Ranks: 0; the others call `receive`.

        Args: fields: plain values of JSON. arguments: arguments of a call.
        Raises: CallFailedError: another rank has exited.
        """
        if self._group is None:
            return
        data = bytes_tensor(signed(to_bytes(fields, arguments), self._purpose()))
        with _naming_lost_ranks("with a request of rank 0"):
            dist.broadcast(torch.tensor([data.numel()]), src=0, group=self._group)
            dist.broadcast(data, src=0, group=self._group)

    def receive(self) -> tuple[dict[str, Any], PlainData]:
        """Wait for a request of rank 0. The wait can be interrupted, and the stall watch does not report it.

        Raises: JobSecretError: the sender is no rank of this job. CallFailedError: rank 0 has exited.
        """
        size = torch.zeros(1, dtype=torch.int64)
        with _naming_lost_ranks("while this rank waited for a request of rank 0"):
            work: Any = dist.broadcast(size, src=0, group=self._group, async_op=True)
            poll_s = 0.0005
            while not work.is_completed():
                time.sleep(poll_s)
                poll_s = min(_LONGEST_POLL_S, 1.2 * poll_s)
            work.wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(data, src=0, group=self._group)
        return from_bytes(verified(data.numpy().tobytes(), self._purpose()))

    def _purpose(self) -> str:
        self._number += 1
        assert self._group is not None, "only a group has requests"
        return f"request {self._number} of group {self._group.group_name}"


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
    packed = pack(arguments.tensors).numpy().tobytes() if arguments.tensors else b""
    return len(header).to_bytes(_HEADER_BYTES) + header + packed


def from_bytes(data: bytes) -> tuple[dict[str, Any], PlainData]:
    """Decode a request of `to_bytes`."""
    start = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES])
    header = json.loads(data[_HEADER_BYTES:start])
    layout = [Piece(tuple(shape), DTYPES[dtype]) for shape, dtype in header["layout"]]
    return header["fields"], PlainData(header["tree"], unpack(bytes_tensor(data[start:]), layout))
