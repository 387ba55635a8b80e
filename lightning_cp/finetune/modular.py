"""Load modular pipelines of diffusers, and give them the call of other pipelines."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import field, make_dataclass
from functools import partial
from typing import Any

from diffusers.modular_pipelines import LoopSequentialPipelineBlocks, PipelineState
from diffusers.utils import BaseOutput
from torch import nn

from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families.registry import family_class
from lightning_cp.finetune.family_table import PLAIN_PIPELINES
from lightning_cp.undoable import intercept_calls

_FIELDS = {"videos": "frames"}  # of modular pipelines -> of others


def is_modular(pipe: Any) -> bool:
    """Return whether a pipeline, or a class of pipelines, is one of diffusers' modular pipelines."""
    return hasattr(pipe, "load_components")


def load_modular(source: str, dtype: Any, *, without: Collection[str], components: Mapping[str, nn.Module]) -> Any:
    """Load a modular pipeline, as a pipeline of the same name that is not modular if diffusers has one.

    Args: see `load_pipeline`.
    Raises: what diffusers raises.
    """
    import diffusers

    pipe: Any = diffusers.ModularPipeline.from_pretrained(source)
    dtypes = dtype if isinstance(dtype, Mapping) else {"default": dtype}
    loaded = dict(components)
    left_out = {*without, *components, *_of_other_tasks(pipe)}
    for name in pipe.pretrained_component_names:
        spec = pipe.get_component_spec(name)
        if name not in left_out and spec.pretrained_model_name_or_path is not None:
            loaded[name] = spec.load(dtype=dtypes.get(name, dtypes["default"]))
    plain = plain_class(type(pipe))
    if plain is not None:
        return _as_plain(plain, pipe, loaded)
    for name, component in loaded.items():
        setattr(pipe, name, component)
    return called_like_others(pipe)


def _of_other_tasks(pipe: Any) -> list[str]:
    """Return the transformers that the pipeline's family does not use: a pipeline may have one for each task."""
    with suppress(FamilyError):
        used = family_class(type(pipe)).components.models
        return [x for x in pipe.pretrained_component_names if x.startswith("transformer") and x not in used]
    return []


def plain_class(kind: type) -> type | None:
    """Return the class of the same name without "Modular"; None if diffusers has none."""
    import diffusers

    found = getattr(diffusers, PLAIN_PIPELINES.get(kind.__name__, kind.__name__.replace("Modular", "")), None)
    return found if isinstance(found, type) and found is not kind else None


def _as_plain(kind: type, pipe: Any, components: Mapping[str, Any]) -> Any:
    """Build a pipeline that is not modular from components and settings of a modular one.

    Settings take the place of guiders, if this pipeline has no guider. Components that the modular one lacks are None.
    """
    given = {**pipe.config, **pipe.components, **components}
    arguments = inspect.signature(kind).parameters
    absent = [name for name, x in arguments.items() if x.default is inspect.Parameter.empty and name not in given]
    return kind(**{name: x for name, x in given.items() if name in arguments}, **dict.fromkeys(absent))


def called_like_others(pipe: Any) -> Any:
    """Change a modular pipeline so that it is called as other pipelines are, and return it.

    The signature of the call has the inputs of its blocks. A list with one entry is passed as this entry, because
    blocks take one prompt and one generator. The result is an output of diffusers with the outputs of the blocks, in
    their order; "videos" are called "frames". The block that encodes text calls `pipe.encode_prompt`.
    """
    pipe.__class__ = _class_with_call(type(pipe), pipe.blocks)
    block = pipe._blocks.sub_blocks.get("text_encoder")
    if block is not None:
        pipe.encode_prompt = partial(_encode, pipe, block, type(block).__call__)
        intercept_calls(block, partial(_encode_by_pipeline, block))
    return pipe


def _encode_by_pipeline(block: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `encode_prompt` of the pipeline in place of a block, and set its outputs in the state."""
    pipe, state = args
    given = {name: state.get(name) for name in _names_of_inputs(block) if state.get(name) is not None}
    encoded = pipe.encode_prompt(**given)
    for x in block.intermediate_outputs:
        state.set(x.name, encoded[x.name], x.kwargs_type)
    return pipe, state


def _encode(pipe: Any, block: Any, call: Any, *, device: object = None, **given: Any) -> dict[str, Any]:
    """Run the block that encodes text. Returns: its outputs by name. The device is that of the text encoder."""
    state = PipelineState()
    for name, value in given.items():
        state.set(name, value)
    call(block, pipe, state)
    return {x.name: state.get(x.name) for x in block.intermediate_outputs}


def _names_of_inputs(block: Any) -> list[str]:
    names = [*(x.name for x in block.inputs), *getattr(block, "block_trigger_inputs", ())]
    return [name for name in dict.fromkeys(names) if name is not None]


def class_with_call(kind: Any) -> type:
    """Return the class that `called_like_others` gives a pipeline with the default blocks of its class."""
    return plain_class(kind) or _class_with_call(kind, kind().blocks)


def _class_with_call(kind: type, blocks: Any) -> type:
    inputs = [x for x in blocks.inputs if x.name is not None]
    arguments = {x.name: inspect.Parameter(x.name, inspect.Parameter.KEYWORD_ONLY, default=x.default) for x in inputs}
    arguments["return_dict"] = inspect.Parameter("return_dict", inspect.Parameter.KEYWORD_ONLY, default=True)
    outputs = tuple(x.name for x in blocks.outputs)
    output_class = _output_class(f"{kind.__name__}Output", tuple(_FIELDS.get(name, name) for name in outputs))

    def call(self: Any, *, return_dict: bool = True, **given: Any) -> Any:
        unknown = [name for name in given if name not in arguments]
        if unknown:
            raise TypeError(f"{kind.__name__} has no argument {', '.join(unknown)}, only {', '.join(arguments)}")
        original: Any = kind.__call__
        state = original(self, **{name: _single(value) for name, value in given.items()})
        result = output_class(*(state.get(name) for name in outputs))
        return result if return_dict else result.to_tuple()

    def set_progress_bar_config(self: Any, **settings: Any) -> None:
        for block in all_blocks(self._blocks):  # diffusers does not set it inside of blocks
            if isinstance(block, LoopSequentialPipelineBlocks):
                block.set_progress_bar_config(**settings)

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = inspect.Signature([this, *arguments.values()])  # type: ignore[attr-defined]
    names = {"__call__": call, "set_progress_bar_config": set_progress_bar_config}
    return type(kind.__name__, (kind,), {**names, "__module__": kind.__module__, "__doc__": kind.__doc__})


@functools.cache
def _output_class(name: str, fields: tuple[str, ...]) -> Any:
    """Return a class of outputs with these fields, any of which may be missing (None)."""
    return make_dataclass(name, [(one, Any, field(default=None)) for one in fields], bases=(BaseOutput,))


def all_blocks(blocks: Any) -> Iterator[Any]:
    """Yield the blocks of a modular pipeline, with those inside of blocks."""
    yield blocks
    for block in blocks.sub_blocks.values():
        yield from all_blocks(block)


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value
