"""Install compiled rules on one model, and remove them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.attention.attention_calls import attending_processor
from lightning_cp.engine.attention.linear import LinearAttention
from lightning_cp.engine.attention.scopes import Scopes
from lightning_cp.engine.attention.stand_ins import hold_originals, hold_stand_ins
from lightning_cp.engine.hook_base import add_hooks, remove_hooks
from lightning_cp.engine.hooks import ModelHook
from lightning_cp.engine.rules.paths import submodule
from lightning_cp.engine.rules.rules import Rules
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.convolutions import EmbeddingHook, HaloHook
from lightning_cp.engine.sharding.sharders import ArgumentHook, OutputHook, PadHook
from lightning_cp.engine.tiles import tile_feed_forwards, untile

_ORIGINAL = "_lightning_cp_original"  # attribute of a processor of the engine: the processor that it replaces
_MARKED = "_parallel_config"
_DEPTH = 3  # how far objects inside objects are followed
_LIBRARIES = ("torch", "lightning_cp", "diffusers.hooks")
_NO_HELPERS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    tuple,
    type(None),
    type,
    Tensor,
    nn.Module,
    ModuleType,
    FunctionType,
)


def install(
    module: nn.Module,
    rules: Rules,
    session: Session,
    *,
    scopes: Scopes,
    signature: Any,
    mlp_tiles: int | str | None = None,
) -> ModelHook:
    """Install `rules` on the modules inside `module`. If a step fails, `strip` undoes the steps before it.

    Args:
        scopes: scopes of the model. Reused by later installations, so that compiled blocks stay valid.
        signature: signature of the model's forward.
        mlp_tiles: see `engine.apply.apply_context_parallel`.
    Returns: the `ModelHook` that runs the model's forward.
    """
    _install_processors(module, rules, session)
    for container in (x for inner in module.modules() for x in _held_by(inner)):
        hold_stand_ins(container)
    for inner, hook in scopes.hooks(rules):
        add_hooks(inner, before=hook.before, after=hook.after, always=True)
    arguments, outputs = [], []
    for rule in rules.arguments:
        refused = rules.refused if rule.is_block else {}
        order = list(inspect.signature(type(submodule(module, rule.paths[0])).forward).parameters)[1:]
        argument_hook = ArgumentHook(session, rule, refused, rule.paths[0] or "forward", order)
        arguments += [argument_hook] if "" in rule.paths else []
        for path in filter(None, rule.paths):
            add_hooks(submodule(module, path), before=argument_hook.before)
    for output in rules.outputs:
        output_hook = OutputHook(session, output)
        if output.path:
            add_hooks(submodule(module, output.path), after=output_hook.after)
        else:
            outputs.append(output_hook)
    for embedding in rules.embeddings:
        embedding_hook = EmbeddingHook(session, embedding)
        add_hooks(submodule(module, embedding.path), before=embedding_hook.before, after=embedding_hook.after)
    for halo in rules.halos:
        halo_hook = HaloHook(session, halo)
        add_hooks(submodule(module, halo.path), before=halo_hook.before, after=halo_hook.after)
    if mlp_tiles is not None:
        tile_feed_forwards(module, rules, mlp_tiles)
    checkpointing = [inner for inner in module.modules() if hasattr(inner, "gradient_checkpointing")]
    padding = PadHook(session, signature, rules.pads) if rules.pads else None
    return ModelHook(session, signature, rules, scopes.of_model(rules), checkpointing, padding, arguments, outputs)


def strip(modules: Iterable[nn.Module]) -> None:
    """Undo `install` on these modules, also on deep copies. The model's forward stays replaced."""
    for module in dict.fromkeys(modules):
        remove_hooks(module)
        untile(module)
        processor: Any = getattr(module, "processor", None)
        original = original_processor(processor)
        if original is not processor:
            module.processor = original
        attributes = getattr(original, "__dict__", {})
        if isinstance(attributes.get(_MARKED), ContextParallelConfig):
            del attributes[_MARKED]
        for container in _held_by(module):
            hold_originals(container)


def original_processor(processor: Any) -> Any:
    """Return the processor that the engine's processor replaces; return other processors unchanged."""
    return getattr(processor, "__dict__", {}).get(_ORIGINAL, processor)


def _held_by(owner: Any, depth: int = _DEPTH) -> Iterator[dict[Any, Any] | list[Any]]:
    """Yield the attributes of a module, and of helper objects in them, and lists and dicts: they may hold functions."""
    container = owner if isinstance(owner, (dict, list)) else getattr(owner, "__dict__", None)
    if not isinstance(container, (dict, list)):
        return
    yield container
    for value in container.values() if isinstance(container, dict) else container:
        if depth > 0 and not isinstance(value, _NO_HELPERS) and not type(value).__module__.startswith(_LIBRARIES):
            yield from _held_by(value, depth - 1)


def _install_processors(module: nn.Module, rules: Rules, session: Session) -> None:
    for path, kinds in rules.attention.items():
        owner: Any = submodule(module, path)
        processor = getattr(owner, "processor", None)
        if kinds and kinds[0].form == "linear":
            _exchange_processor(owner, LinearAttention(session, kinds[0].queries))
        elif attending_processor(owner) is not processor:
            _exchange_processor(owner, attending_processor(owner))
        elif kinds is None and hasattr(processor, _MARKED):  # diffusers' processors pass it to attention across ranks
            processor.__dict__[_MARKED] = session.config


def _exchange_processor(module: Any, replacement: Any) -> None:
    """Set another processor on `module`; it stores the original for `strip`."""
    replacement.__dict__[_ORIGINAL] = module.processor
    module.processor = replacement
