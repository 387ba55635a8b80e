"""Install compiled rules on one model, and remove them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from torch import nn

from lightning_cp.engine.attention_dispatch import AttentionDispatcher
from lightning_cp.engine.attention_patch import AttentionPatch, exchange_processor, release
from lightning_cp.engine.dropout import ShardDropouts
from lightning_cp.engine.halo import HaloHook
from lightning_cp.engine.hook_base import add_hooks, remove_hooks
from lightning_cp.engine.hooks import ModelHook
from lightning_cp.engine.interception import BypassHook, InterceptionHook
from lightning_cp.engine.linear import LinearAttention
from lightning_cp.engine.padding import PadHook
from lightning_cp.engine.paths import submodule, unwrapped
from lightning_cp.engine.rules import AttentionSpecs, Rules
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharders import ArgumentHook, OutputHook
from lightning_cp.engine.unplanned import UnplannedAttention

Patches = dict[AttentionSpecs | str | None, AttentionPatch]  # by kinds of attention
_UNPLANNED = "unplanned"


def install(
    module: nn.Module,
    rules: Rules,
    session: Session,
    *,
    patches: Patches,
    dropouts: ShardDropouts,
    signature: Any,
    dispatcher: Any,
) -> ModelHook:
    """Install `rules` on the modules inside `module`. If a step fails, `strip` undoes the steps before it.

    Args:
        patches: replacements of attention calls. Reused by later installations, so that compiled blocks stay valid.
        dropouts: replacements of dropout in blocks. Also reused.
        signature: signature of the model's forward.
        dispatcher: diffusers' `dispatch_attention_fn`; None for other models.
    Returns: the `ModelHook` that runs the model's forward.
    """
    _install_attention(module, rules, session, patches, dropouts, dispatcher)
    _install_unplanned(module, rules, session, patches, dispatcher)
    dropouts.install(module, rules)
    for ancestor, hook in _interception_hooks(module, rules, session):
        add_hooks(ancestor, before=hook.before, after=hook.after, always=True)
    for inner in module.modules():
        if isinstance(inner, nn.MultiheadAttention):
            add_hooks(inner, before=BypassHook(session, module).before)
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
    for halo in rules.halos:
        halo_hook = HaloHook(session, halo)
        add_hooks(submodule(module, halo.path), before=halo_hook.before, after=halo_hook.after)
    checkpointing = [inner for inner in module.modules() if hasattr(inner, "gradient_checkpointing")]
    padding = PadHook(session, signature, rules.pads) if rules.pads else None
    return ModelHook(session, signature, rules, checkpointing, padding, arguments, outputs)


def strip(modules: Iterable[nn.Module]) -> None:
    """Undo `install` on these modules. The model's forward stays replaced."""
    for module in dict.fromkeys(modules):
        remove_hooks(module)
        release(module)


def _install_attention(
    module: nn.Module, rules: Rules, session: Session, patches: Patches, dropouts: ShardDropouts, dispatcher: Any
) -> None:
    for path, kinds in rules.attention.items():
        if kinds and kinds[0].form == "linear":
            exchange_processor(submodule(module, path), LinearAttention(session, kinds[0].queries))
            continue
        if kinds not in patches:
            planned = AttentionDispatcher(session, kinds, dispatcher)
            patches[kinds] = AttentionPatch(planned.dispatch, planned.sdpa, dropouts.replacements)
        patches[kinds].intercept(submodule(module, path), mark=session.config if kinds is None else None)


def _install_unplanned(module: nn.Module, rules: Rules, session: Session, patches: Patches, dispatcher: Any) -> None:
    for path in rules.unplanned:
        if _UNPLANNED not in patches:
            unplanned = UnplannedAttention(session, module, dispatcher)
            patches[_UNPLANNED] = AttentionPatch(unplanned.dispatch, unplanned.sdpa)
        patches[_UNPLANNED].intercept(submodule(module, path), mark=None)


def _interception_hooks(
    module: nn.Module, rules: Rules, session: Session
) -> Iterator[tuple[nn.Module, InterceptionHook]]:
    """Yield each module between the model and its attention, with its hook.

    In blocks with attention across ranks and in modules of `rules.unproven`, the hook checks the interception.
    """
    blocks = {path for rule in rules.arguments if rule.is_block for path in rule.paths}
    across = {path for path in blocks if any(f"{at}.".startswith(f"{path}.") for at in rules.attention)}
    paths = set(blocks)
    for path in rules.attention:
        atoms = path.split(".")
        paths |= {".".join(atoms[: i + 1]) for i in range(len(atoms))}
    # Few hooks for many blocks, so that compiled blocks can share their code.
    flags = list(product((True, False), (True, False)))  # (outermost, checked)
    hooks = {(outer, checked): InterceptionHook(session, module, outer, checked) for outer, checked in flags}
    for path in sorted(paths - {""}):
        inner = unwrapped(submodule(module, path))
        if isinstance(inner, nn.ModuleList):
            continue
        parents = {".".join(path.split(".")[:i]) for i in range(1, path.count(".") + 1)}
        is_outermost = all(isinstance(submodule(module, p), nn.ModuleList) for p in parents)
        yield inner, hooks[is_outermost, path in across or path in rules.unproven]
