"""Plain data as values of JSON and tensors, so that other ranks rebuild it without pickle."""

from __future__ import annotations

import dataclasses
import importlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from lightning_cp.nest import dataclass_fields

DTYPES = {str(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_JSON = (type(None), bool, int, float, str)
_DEEPEST, _LONGEST_INT = 64, 4096  # levels of a nest, bits: both sides can convert them, whatever Python's limits are
_Built = Callable[["PlainData", Any, torch.device], Any]


@dataclass(frozen=True)
class PlainData:
    """Nests of plain data.

    Attributes:
        tree: values of JSON, one for each nest. A dict of one item is a value that JSON does not have:
            its kind and contents.
        tensors: tensors and bytes to which the tree refers by their index, on the CPU.
        generators: the generators that were converted, or rebuilt, by the index of their state.
    """

    tree: list[Any]
    tensors: list[Tensor]
    generators: dict[int, torch.Generator] = field(default_factory=dict)

    @classmethod
    def of(cls, *nests: Any) -> PlainData:
        """Convert nests of arguments.

        Raises: TypeError: an argument is not plain data. ValueError: it is nested too deeply, or has a huge integer.
            The error names it.
        """
        data = cls([], [])
        data.tree.extend(data._packed(nest, "") for nest in nests)
        return data

    def on(self, device: torch.device) -> list[Any]:
        """Rebuild the nests. Tensors and generators that were not on rank 0's CPU are put on `device`.

        A generator in several places is one generator again: each place draws further numbers.
        """
        self.generators.clear()
        return self._items(self.tree, device)

    def _built(self, tree: Any, device: torch.device) -> Any:
        if not isinstance(tree, dict):
            return tree
        ((kind, contents),) = tree.items()
        return _KINDS[kind](self, contents, device)

    def _items(self, contents: Any, device: torch.device) -> list[Any]:
        return [self._built(x, device) for x in contents]

    def _bytes(self, index: int) -> bytes:
        return self.tensors[index].numpy().tobytes()

    def _tensor(self, contents: Any, device: torch.device) -> Tensor:
        index, was_on_cpu = contents
        tensor: Tensor = self.tensors[index]
        return tensor if was_on_cpu else tensor.to(device)

    def _generator(self, contents: Any, device: torch.device) -> torch.Generator:
        index, was_on_cpu = contents
        if index not in self.generators:
            generator = torch.Generator(torch.device("cpu") if was_on_cpu else device)
            generator.set_state(self.tensors[index].clone())  # torch crashes with a view of a larger buffer
            self.generators[index] = generator
        return self.generators[index]

    def _image(self, contents: Any) -> Image.Image:
        mode, size, pixels, palette, transparency = contents
        image = Image.frombytes(mode, tuple(size), self._bytes(pixels))
        if palette is not None:
            image.putpalette(self._bytes(palette[1]), palette[0])
        if transparency is not None:
            image.info["transparency"] = self._built(transparency, torch.device("cpu"))
        return image

    def _dataclass(self, contents: Any, device: torch.device) -> Any:
        module, name, packed = contents
        kind = _dataclass(module, name)
        if kind is None:
            raise TypeError(f"{module}.{name} is not a dataclass of diffusers")
        fields = self._built(packed, device)
        if issubclass(kind, dict):  # an output, with its fields as items
            return kind(**fields)
        value: Any = object.__new__(kind)  # as it was: __init__ may convert its arguments again
        for field_name, x in fields.items():
            object.__setattr__(value, field_name, x)
        return value

    def _packed(self, value: Any, name: str, depth: int = 0) -> Any:
        if type(value) is int and value.bit_length() > _LONGEST_INT:
            size = f"{value.bit_length()} bits, which must be at most {_LONGEST_INT}"
            raise ValueError(f"{name or 'an argument'} is an integer of {size}")
        if type(value) in _JSON:
            return value
        if depth > _DEEPEST:
            raise ValueError(f"{name.split('[')[0] or 'an argument'} is nested in more than {_DEEPEST} levels")
        depth += 1
        if type(value) in (list, tuple):
            return {type(value).__name__: [self._packed(x, f"{name}[{i}]", depth) for i, x in enumerate(value)]}
        kind, fields = type(value), dataclass_fields(value)
        if fields is not None and _dataclass(kind.__module__, kind.__qualname__) is kind:
            return {"dataclass": [kind.__module__, kind.__qualname__, self._packed(fields, name, depth)]}
        if isinstance(value, Mapping) and fields is None:  # outputs of diffusers are both
            pairs = (
                (self._packed(key, "a key"), self._packed(x, f"{name}[{key!r}]" if name else str(key), depth))
                for key, x in value.items()
            )
            return {"dict": list(pairs)}
        if isinstance(value, torch.Generator):
            index = next((i for i, one in self.generators.items() if one is value), None)
            if index is None:
                index = self._index(value.get_state())
                self.generators[index] = value
            return {"generator": [index, value.device.type == "cpu"]}
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
            on_cpu = value.detach().cpu().resolve_conj().resolve_neg()
            return {"tensor": [self._index(on_cpu), value.device.type == "cpu"]}
        if isinstance(value, Image.Image):
            return {"image": self._packed_image(value)}
        if isinstance(value, np.generic) or type(value) is np.ndarray:
            contents = np.asarray(value)
            if not contents.dtype.hasobject:
                file = io.BytesIO()
                np.save(file, contents, allow_pickle=False)
                return {"array" if type(value) is np.ndarray else "scalar": self._index(file.getvalue())}
        if type(value) is complex:
            return {"complex": [value.real, value.imag]}
        if type(value) is bytes:
            return {"bytes": self._index(value)}
        if type(value) is type(Path()):
            return {"path": str(value)}
        if type(value) is torch.dtype:
            return {"dtype": str(value)}
        raise TypeError(
            f"{name or 'an argument'} is a {type(value).__name__}, which is not sent to other ranks: only numbers, "
            "text, dense tensors, arrays, images, generators, dataclasses of diffusers, and lists and dicts of them"
        )

    def _packed_image(self, image: Image.Image) -> list[Any]:
        pixels = self._index(image.tobytes())  # read first: a file may change the palette
        kind = image.palette.mode if image.palette is not None else None
        palette = None if kind is None else [kind, self._index(bytes(image.getpalette(kind) or ()))]
        transparency = self._packed(image.info.get("transparency"), "an image's transparency")
        return [image.mode, list(image.size), pixels, palette, transparency]

    def _index(self, contents: Tensor | bytes) -> int:
        self.tensors.append(contents if isinstance(contents, Tensor) else bytes_tensor(contents))
        return len(self.tensors) - 1


def _dataclass(module: str, name: str) -> type | None:
    """Return a dataclass of diffusers by its name; None if it is something else. A request can name no other class."""
    if not module.startswith("diffusers."):
        return None
    kind = getattr(importlib.import_module(module), name, None)
    is_one = isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == module
    return kind if is_one else None


def bytes_tensor(data: bytes) -> Tensor:
    """Copy bytes to a tensor, uint8 [bytes]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


# How each kind of value is rebuilt: nothing else is.
_KINDS: dict[str, _Built] = {
    "list": lambda data, contents, device: data._items(contents, device),
    "tuple": lambda data, contents, device: tuple(data._items(contents, device)),
    "dict": lambda data, contents, device: dict(data._items(pair, device) for pair in contents),
    "generator": lambda data, contents, device: data._generator(contents, device),
    "tensor": lambda data, contents, device: data._tensor(contents, device),
    "image": lambda data, contents, _: data._image(contents),
    "dataclass": lambda data, contents, device: data._dataclass(contents, device),
    "array": lambda data, contents, _: np.load(io.BytesIO(data._bytes(contents)), allow_pickle=False),
    "scalar": lambda data, contents, _: np.load(io.BytesIO(data._bytes(contents)), allow_pickle=False)[()],
    "complex": lambda data, contents, _: complex(*contents),
    "bytes": lambda data, contents, _: data._bytes(contents),
    "path": lambda data, contents, _: Path(contents),
    "dtype": lambda data, contents, _: DTYPES[contents],
}
