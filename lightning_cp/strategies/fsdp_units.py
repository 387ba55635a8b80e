"""Choose the FSDP2 units: each is a module that all-gathers its weights together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_cp.engine.apply import Installed


def find_fsdp_units(
    module: nn.Module, installed: Sequence[Installed], frozen: Sequence[nn.Module], *, by_child: bool
) -> list[nn.Module]:
    """List the modules to shard, inner ones first: blocks, then the rest of the module.

    FSDP2 would shard a tied weight separately in each unit that uses it, and the copies would diverge. So a block or
    child is a unit only if its weights are used nowhere else; otherwise the outer module shards them.

    Args:
        installed: the context-parallel transformers in `module`.
        frozen: children that are not sharded.
        by_child: make each child a unit, because children are called without the module's forward.
    """
    blocks = [unit for unit in _blocks(module, installed, without=frozen) if _owns_its_weights(unit, module)]
    if len(installed) > 1:  # a pipeline calls a ControlNet and its transformer without the forward of their parent
        blocks += [one.module for one in installed if _owns_its_weights(one.module, module)]
    if not by_child:
        return [*dict.fromkeys((*blocks, module))]
    whole = {*frozen}  # a set, because torchmetrics makes `metric == module` true, for any module
    children = [child for child in _called(module) if child not in whole]
    units = [child for child in children if _owns_its_weights(child, module)]
    has_rest = len(units) < len(children) or any(True for _ in module.parameters(recurse=False))
    return [*dict.fromkeys((*blocks, *units)), *([module] if has_rest else [])]  # a child's ModuleList holds blocks


def _owns_its_weights(unit: nn.Module, module: nn.Module) -> bool:
    """Return whether the weights of `unit` are used nowhere else in `module`, also not through a shared child."""
    weights, outside = set(unit.parameters()), {unit}
    waiting = [module]
    while waiting:  # every module that is reachable without passing through `unit`
        inner = waiting.pop()
        if inner not in outside:
            outside.add(inner)
            waiting += inner.children()
    outside.remove(unit)
    return not any(parameter in weights for inner in outside for parameter in inner.parameters(recurse=False))


def frozen_children(module: nn.Module, installed: Sequence[Installed]) -> list[nn.Module]:
    """List frozen children, such as text encoders and VAEs, of a module that has trained weights.

    A transformer itself has none: its layers are only called by its forward, also those without an adapter.
    """
    parallel = {one.module for one in installed}
    if module in parallel or not any(parameter.requires_grad for parameter in module.parameters()):
        return []
    return [
        child
        for child in module.children()
        if not parallel & set(child.modules()) and not any(parameter.requires_grad for parameter in child.parameters())
    ]


def _called(module: nn.Module) -> list[nn.Module]:
    """List children with weights; a container (it has no forward) is replaced by its children."""
    called: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            called += _called(child)
        elif any(True for _ in child.parameters()):
            called.append(child)
    return called


def _blocks(module: nn.Module, installed: Sequence[Installed], *, without: Sequence[nn.Module]) -> list[nn.Module]:
    planned = [
        one.module.get_submodule(path)
        for one in installed
        for rule in one.model_plan.arguments
        if rule.is_block
        for path in rule.paths
    ]
    excluded = {inner for one in installed if planned for inner in one.module.modules()}
    excluded |= {inner for child in without for inner in child.modules()}
    in_lists = [
        block
        for inner in module.modules()
        if isinstance(inner, nn.ModuleList) and inner not in excluded
        for block in inner
        if any(True for _ in block.parameters())
    ]
    nested = {inner for block in (*planned, *in_lists) for inner in block.modules() if inner is not block}
    return [block for block in dict.fromkeys((*planned, *in_lists)) if block not in nested]  # one may be listed twice
