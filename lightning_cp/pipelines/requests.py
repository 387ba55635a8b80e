"""Requests from rank 0 to the ranks that follow it: plain data only, sent over the job's process group."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Path()), torch.dtype)
_LONGEST_POLL_S = 0.02


@dataclass(frozen=True)
class Sendable:
    """A nest of plain data; tensors are on the host, and generators are states."""

    value: Any

    def on(self, device: torch.device) -> Any:
        """Return the data. Tensors and generators that were not on rank 0's CPU are put on `device`."""
        return _unpacked(self.value, device)


@dataclass(frozen=True)
class _Tensor:
    """A tensor, or a generator's state, on the CPU. `on_device`: it was on rank 0's GPU."""

    values: Tensor
    on_device: bool
    is_generator: bool = False


def sendable(values: Any) -> Sendable:
    """Prepare arguments for other ranks. Raises: TypeError: one is not plain data; the error names it."""
    return Sendable(_packed(values, ""))


def send(request: Any, group: dist.ProcessGroup | None) -> None:
    """Send a request to all other ranks of `group`. Ranks: 0; the others call `receive`."""
    if group is None:
        return
    data = torch.frombuffer(bytearray(pickle.dumps(request)), dtype=torch.uint8)
    dist.broadcast(torch.tensor([data.numel()]), src=0, group=group)
    dist.broadcast(data, src=0, group=group)


def receive(group: dist.ProcessGroup | None) -> Any:
    """Wait for a request of rank 0. The wait can be interrupted, and the stall watch does not report it."""
    size = torch.zeros(1, dtype=torch.int64)
    work: Any = dist.broadcast(size, src=0, group=group, async_op=True)
    poll_s = 0.0005
    while not work.is_completed():
        time.sleep(poll_s)
        poll_s = min(_LONGEST_POLL_S, 1.2 * poll_s)
    work.wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    return pickle.loads(data.numpy().tobytes())  # from rank 0 of this job, which sends plain data only


def _packed(value: Any, name: str) -> Any:
    if type(value) in _PLAIN or isinstance(value, np.generic):
        return value
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value
    if type(value) in (list, tuple):
        return type(value)(_packed(x, f"{name}[{i}]") for i, x in enumerate(value))
    if isinstance(value, Mapping):
        return {_packed(key, "a key"): _packed(x, f"{name}[{key!r}]" if name else str(key)) for key, x in value.items()}
    if isinstance(value, torch.Generator):
        return _Tensor(value.get_state(), value.device.type != "cpu", is_generator=True)
    if isinstance(value, Tensor):
        return _Tensor(value.detach().cpu(), value.device.type != "cpu")
    if isinstance(value, Image.Image):
        return value.copy()  # without the file that it may still have to read
    raise TypeError(
        f"{name or 'an argument'} is a {type(value).__name__}, which is not sent to other ranks: only numbers, text, "
        "tensors, arrays, images, generators, and lists and dicts of them"
    )


def _unpacked(value: Any, device: torch.device) -> Any:
    if isinstance(value, _Tensor):
        at = device if value.on_device else torch.device("cpu")
        if not value.is_generator:
            return value.values.to(at)
        generator = torch.Generator(at)
        generator.set_state(value.values)
        return generator
    if type(value) in (list, tuple):
        return type(value)(_unpacked(x, device) for x in value)
    if isinstance(value, dict):
        return {key: _unpacked(x, device) for key, x in value.items()}
    return value
