"""Walk nested values: dicts, lists and tuples of tensors and plain values, and results of diffusers models.

`replace` uses torch's pytree. `named_leaves` does not: it walks the arguments of a model in every forward, and pytree
takes three times as long to name the leaves. It also goes into subclasses of dict, list and tuple, which pytree does
not know.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from lightning_cp.compat.torch_names import tree_iter, tree_map_only

T = TypeVar("T")


def named_leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the leaves of a nest with their names, such as `hidden_states[0]` or `kwargs['scale']`.

    Args:
        name: name of the value; "": the keys of a dict are the names.
        value: the nest.
    """
    if isinstance(value, dict):
        for key, x in value.items():
            yield from named_leaves(f"{name}[{key!r}]" if name else str(key), x)
    elif isinstance(value, (list, tuple)):
        for i, x in enumerate(value):
            yield from named_leaves(f"{name}[{i}]", x)
    else:
        yield name, value


def dataclass_fields(value: object) -> dict[str, Any] | None:
    """Return the fields of a dataclass by name; None for other objects, and for classes."""
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return None
    return {x.name: getattr(value, x.name) for x in dataclasses.fields(value)}


def named_tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nest with their names; see `named_leaves`."""
    return ((where, x) for where, x in named_leaves(name, value) if isinstance(x, Tensor))


def tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors of a nest."""
    return (x for _, x in named_tensors("", value))


def of_type(kind: type[T], value: object) -> Iterator[T]:
    """Yield the leaves of a type."""
    return (x for x in tree_iter(value) if isinstance(x, kind))


def replace(kind: type[T], function: Callable[[T], object], value: Any) -> Any:
    """Replace each leaf of a type by `function(leaf)`; other leaves and the structure stay.

    A value without such a leaf is returned itself. The results of diffusers models are changed in place, because they
    cannot be rebuilt from their items.
    """
    if not any(True for _ in of_type(kind, value)):
        return value
    if isinstance(value, OrderedDict):
        for key, x in list(value.items()):
            value[key] = replace(kind, function, x)
        return value
    return tree_map_only(kind, function, value)
