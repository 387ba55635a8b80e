"""Give a modular pipeline of diffusers the call of other pipelines: arguments with names, and a result with fields."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import field, make_dataclass
from typing import Any

from diffusers.utils import BaseOutput

_FIELDS = {"videos": "frames"}  # of modular pipelines -> of others


def is_modular(pipe: Any) -> bool:
    """Return whether a pipeline is one of diffusers' modular pipelines."""
    return hasattr(pipe, "blocks") and hasattr(pipe, "load_components")


def called_like_others(pipe: Any) -> Any:
    """Change a modular pipeline so that it is called as other pipelines are, and return it.

    The signature of the call has the inputs of its blocks. A list with one entry is passed as this entry, because
    blocks take one prompt and one generator. The result is an output of diffusers with the outputs of the last blocks,
    in their order; "videos" are called "frames".
    """
    kind = type(pipe)
    inputs = [x for x in pipe.blocks.inputs if x.name is not None and x.name.isidentifier()]
    arguments = {x.name: inspect.Parameter(x.name, inspect.Parameter.KEYWORD_ONLY, default=x.default) for x in inputs}
    arguments["return_dict"] = inspect.Parameter("return_dict", inspect.Parameter.KEYWORD_ONLY, default=True)
    outputs = [x.name for x in pipe.blocks.outputs]
    output_class = _output_class(f"{kind.__name__}Output", tuple(_FIELDS.get(name, name) for name in outputs))

    def call(self: Any, *, return_dict: bool = True, **given: Any) -> Any:
        unknown = [name for name in given if name not in arguments]
        if unknown:
            raise TypeError(f"{kind.__name__} has no argument {', '.join(unknown)}, only {', '.join(arguments)}")
        state = kind.__call__(self, **{name: _single(value) for name, value in given.items()})
        result = output_class(*(state.get(name) for name in outputs))
        return result if return_dict else result.to_tuple()

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = inspect.Signature([this, *arguments.values()])  # type: ignore[attr-defined]
    names = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    pipe.__class__ = type(kind.__name__, (kind,), names)
    return pipe


def modules_of_blocks(blocks: Any) -> Iterator[str]:
    """Yield the names of the Python modules that define the blocks of a modular pipeline."""
    yield type(blocks).__module__
    for block in blocks.sub_blocks.values():
        yield from modules_of_blocks(block)


@functools.cache
def _output_class(name: str, fields: tuple[str, ...]) -> type:
    """Return a class of outputs with these fields, any of which may be missing (None)."""
    return make_dataclass(name, [(one, Any, field(default=None)) for one in fields], bases=(BaseOutput,))


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value
