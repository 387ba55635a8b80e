"""ControlNets of a pipeline: computed by all ranks that share a sample, each with its shard of the tokens.

A pipeline may use a ControlNet's residuals for several branches of guidance, so every rank needs them. Therefore these
calls are not assigned to branches: all ranks of a sample divide the tokens, as for autoencoders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.apply import Installed
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.guidance.branches import BranchRunner
from lightning_cp.pipelines.lazy_tensor import resolve_all
from lightning_cp.plans import plan_for
from lightning_cp.undoable import Around

_FOLDER = "diffusers.models.controlnets."


def is_controlnet(module: object) -> bool:
    """Return True if a component is a ControlNet of diffusers, or several in one module."""
    return any(kind.__module__.startswith(_FOLDER) for kind in type(module).__mro__)


def controlnets_of(components: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the ControlNets that can be split, by name; the others compute all tokens on each rank."""
    controlnets: dict[str, nn.Module] = {}
    for name, module in components.items():
        if not isinstance(module, nn.Module) or not is_controlnet(module):
            continue
        several = module._modules.get("nets")
        each = [(name, module)] if several is None else [(f"{name}.nets.{i}", x) for i, x in several.named_children()]
        controlnets |= {
            path: x for path, x in each if plan_for(x) and not any(x is other for other in controlnets.values())
        }
    return controlnets


def groups_of_all(config: ContextParallelConfig, ranks: SampleGroups) -> tuple[ContextParallelConfig, MeshGroups]:
    """Return the settings and groups of a model that all ranks of a sample compute: a ring over branches and stages."""
    if ranks.cfg == ranks.pipe == 1:
        return config, ranks.context
    return replace(config, ring_degree=ranks.sample.context_size, ulysses_degree=1, mesh=None), ranks.sample


def after_vote(calls: BranchRunner, votes: Votes, installed: Installed) -> Around:
    """Wrap a ControlNet's calls: ranks vote before each of them."""

    def around(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not calls.is_active:  # outside of the pipeline's calls the RNG is not synchronised
            installed.session.peers.compare_next_in_full()
        args, kwargs = resolve_all((args, kwargs))
        with votes.before_exchanges():
            return call(*args, **kwargs)

    return around
