"""Messages of rank 0 to the ranks that follow it: `torch.save` bytes, which are read without running code."""

from __future__ import annotations

import importlib
import io
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from lightning_cp.comm.lost_connections import raise_if_lost
from lightning_cp.nest import dataclass_fields

_LONGEST_POLL_S = 0.02


class Messages:
    """Messages of rank 0 to all other ranks.

    Args: group: gloo group of the world; None: rank 0 is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def send(self, **message: Any) -> None:
        """Send a message, and wait until all ranks read it. Raises: CallFailedError: another rank has exited."""
        if self._group is None:
            return
        data = to_bytes(message)
        with _naming_lost_ranks("with a message of rank 0"):
            for x in (torch.tensor([data.numel()]), data):
                dist.broadcast(x, 0, group=self._group)

    def receive(self) -> dict[str, Any]:
        """Wait for the next message. The wait can be interrupted, and the stall watch ignores it.

        Raises: CallFailedError: rank 0 has exited.
        """
        size, poll_s = torch.zeros(1, dtype=torch.int64), 0.0005
        with _naming_lost_ranks("while this rank waited for a message of rank 0"):
            work: Any = dist.broadcast(size, 0, group=self._group, async_op=True)
            while not work.is_completed():
                time.sleep(poll_s)
                poll_s = min(_LONGEST_POLL_S, 1.2 * poll_s)
            work.wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(data, 0, group=self._group)
        message: dict[str, Any] = from_bytes(data)
        return message


@contextmanager
def _naming_lost_ranks(when: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise_if_lost(error, when)
        raise


def to_bytes(value: object, name: str = "a message") -> Tensor:
    """Encode plain data: numbers, text, tensors, arrays, images, generators, diffusers' dataclasses, and nests of them.

    Args: name: what it is, for the error.
    Returns: uint8 [bytes]. Raises: TypeError: it holds something else; the error names it.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file, pickle_module=SimpleNamespace(__name__=__name__, Pickler=_Pickler))
        _named_objects(file)
    except Exception as error:  # objects that cannot be pickled raise errors of all kinds
        raise TypeError(
            f"{name} cannot be sent to other ranks, only plain data can (numbers, text, tensors, arrays, images, "
            f"generators, dataclasses of diffusers, and lists and dicts of them): {error}"
        ) from error
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:
    """Decode the bytes of `to_bytes`. What was on an accelerator is put on this rank's.

    Raises: TypeError: the bytes name something that is not plain data. ValueError, RuntimeError,
        pickle.UnpicklingError: they are damaged.
    """
    file = io.BytesIO(data.numpy().tobytes())
    with safe_globals([*_named_objects(file), *_NUMPY_DTYPES]):
        return torch.load(file, map_location=_on_this_rank, weights_only=True)


class _Pickler(pickle.Pickler):
    """Reduces generators, images, arrays and dataclasses. One object in several places stays one."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return _generator, (value.get_state(), value.device.type)
        if isinstance(value, Image.Image):
            return _image, _image_parts(value)
        if type(value) is np.ndarray and not value.dtype.hasobject:  # as a tensor, which needs no copy as text
            data = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
            return _array, (data, value.dtype, value.shape)
        if type(value) is Tensor and _is_view_of_more(value):  # torch saves the whole storage
            return value.detach().clone().__reduce_ex__(2)  # type: ignore[no-untyped-call]
        fields = dataclass_fields(value)
        return NotImplemented if fields is None else (_dataclass, (type(value), fields))


def _is_view_of_more(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_quantized and x.untyped_storage().nbytes() > x.nbytes


def _image_parts(image: Image.Image) -> tuple[Any, ...]:
    data = bytearray(image.tobytes())  # read first: a file may change the palette
    palette = None if image.palette is None else (bytes(image.getpalette(mode := image.palette.mode) or ()), mode)
    return image.mode, image.size, torch.frombuffer(data, dtype=torch.uint8), palette, image.info.get("transparency")


def _image(mode: str, size: tuple[int, int], data: Tensor, palette: Any, transparency: Any) -> Image.Image:
    image = Image.frombytes(mode, size, data.numpy().tobytes())
    if palette is not None:
        image.putpalette(*palette)
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def _array(data: Tensor, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return data.numpy().view(dtype).reshape(shape)


def _generator(state: Tensor, device: str) -> torch.Generator:
    return torch.Generator(device).set_state(state)


def _dataclass(kind: type, fields: dict[str, Any]) -> Any:
    if issubclass(kind, dict):  # an output of diffusers, with its fields as items
        return kind(**fields)
    value: Any = object.__new__(kind)  # as it was: __init__ may convert its arguments again
    for name, x in fields.items():
        object.__setattr__(value, name, x)
    return value


def _on_this_rank(storage: Any, place: str) -> Any:
    return storage if place == "cpu" else storage.to(device=place.partition(":")[0])


_NUMPY_DTYPES = [kind for name in np.dtypes.__all__ if isinstance(kind := getattr(np.dtypes, name), type)]
_ALLOWED: Any = (_array, _dataclass, _generator, _image, bytes, type(Path()), np.dtype, np.float32(0).__reduce__()[0])
_PLAIN = {f"{x.__module__}.{x.__qualname__}": x for x in _ALLOWED}


def _named_objects(file: io.BytesIO) -> list[Any]:
    """Return the functions and classes that bytes name, besides torch's own. Raises: TypeError: one is not plain."""
    file.seek(0)
    named = {name: _PLAIN.get(name) or _dataclass_of_diffusers(name) for name in get_unsafe_globals_in_checkpoint(file)}
    if others := sorted(name for name, x in named.items() if x is None):
        raise TypeError(f"it refers to {', '.join(others)}")
    file.seek(0)
    return list(named.values())


def _dataclass_of_diffusers(name: str) -> type | None:
    module, _, name = name.rpartition(".")
    if not module.startswith("diffusers."):
        return None
    kind = getattr(importlib.import_module(module), name, None)
    is_one = isinstance(kind, type) and hasattr(kind, "__dataclass_fields__") and kind.__module__ == module
    return kind if is_one else None
