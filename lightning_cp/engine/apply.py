"""Make a model context-parallel in place, and undo it: `apply_context_parallel`, `remove_context_parallel`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_cp.comm.agree import compare_settings
from lightning_cp.compat.check import check_private_uses
from lightning_cp.compat.diffusers_names import hooks_of
from lightning_cp.config import ContextParallelConfig, ParallelConfig, context_config
from lightning_cp.engine.attention.diffusers_dispatch import backends_of, kernel_for
from lightning_cp.engine.fit_plan import fit_plan
from lightning_cp.engine.installed import Installed, installed_on
from lightning_cp.engine.paths import unwrapped
from lightning_cp.engine.peers.comparison import PeerCheck, forwards_to_check
from lightning_cp.engine.session import Session
from lightning_cp.engine.tiles import check_tiles
from lightning_cp.errors import PlanError, ShapeError
from lightning_cp.kernels import check_kernel
from lightning_cp.mesh.groups import MeshGroups, groups_for
from lightning_cp.plans import REGISTERED, refusal, registered_plan

__all__ = [
    "Installed",
    "NoPlanError",
    "apply_context_parallel",
    "installed_on",
    "no_plan_message",
    "parallelize",
    "remove_context_parallel",
]


class NoPlanError(PlanError):
    """A model whose class has no plan."""


def apply_context_parallel(
    module: nn.Module,
    parallel_config: object,
    plan: object = None,
    *,
    shares: Sequence[float] | None = None,
    mlp_tiles: int | str | None = None,
) -> None:
    """Make `module` context-parallel: its forward takes and returns whole tensors on every rank.

    The model may be compiled before or after, as a whole or block by block. Processors, adapters, forwards and wrappers
    may be changed later: each forward follows them. If modules that the plan names were exchanged or removed, or have
    another class, it raises PlanError, which says what has changed: apply the plan again.

    Args:
        module: any module; diffusers' transformers of `lightning_cp.plans.REGISTERED` need no plan.
        parallel_config: `ContextParallelConfig` or `ParallelConfig`, lightning_cp's or diffusers'.
        plan: a `lightning_cp.plans.Plan`, or a dict in diffusers' `_cp_plan` format.
        shares: for unequal devices, a positive weight for each rank of the context group, in rank order: [2, 1] gives
            the first rank two thirds of the tokens (and of the heads, with Ulysses). None: equal.
        mlp_tiles: number of tiles of tokens in which each feed-forward of a block is computed, to save memory; "auto":
            as many as make a tile's widest tensor no larger than the feed-forward's input. None: one piece.
    Gradient: each rank computes the whole loss. Each parameter's gradient, averaged over the ranks of the context
        group, equals the gradient in one process. (DDP and FSDP average over all ranks.)
    Ranks: all of the context group, also in every later forward and backward.
    Raises:
        ValueError: the class has no plan, the plan does not fit, the module is already parallel (by lightning_cp or by
            diffusers), or the degrees do not fit the world size. The module is unchanged then.
        TypeError: an argument has the wrong type.
        PeerMismatchError: the ranks of the context group were given different shares.
    """
    parallelize(module, context_config(parallel_config), plan, shares=shares, mlp_tiles=mlp_tiles)


def parallelize(
    module: nn.Module,
    config: ContextParallelConfig,
    plan: object = None,
    *,
    kernel: str = "auto",
    check_peers: str = "sampled",
    shares: Sequence[float] | None = None,
    mlp_tiles: int | str | None = None,
    groups: MeshGroups | None = None,
) -> Installed:
    """Make a module context-parallel: `apply_context_parallel` with more settings.

    Args:
        kernel: name of the attention kernel.
        check_peers: forwards in which ranks compare their arguments; see `PeerCheck`.
        shares, mlp_tiles: see `apply_context_parallel`.
        groups: ranks that share the tokens; None: the context group of `config`, with `shares`.
    Returns: the state of the parallel model.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got a {type(module).__name__}")
    check_private_uses("model")
    module = unwrapped(module)  # without torch.compile's wrapper
    _check_untouched(module)
    check_kernel(kernel)
    forwards_to_check(check_peers)
    check_tiles(mlp_tiles)
    plan = plan if plan is not None else registered_plan(type(module))
    if plan is None:
        raise NoPlanError(no_plan_message(type(module)))
    model_plan = fit_plan(module, plan)
    _check_heads(module, config)
    groups = groups_for(config, shares) if groups is None else groups
    peers = PeerCheck(groups, list(inspect.signature(type(module).forward).parameters)[1:], check_peers)
    session = Session(groups, config, model_plan, peers, kernel, backends_of(module))
    for backend in _chosen_backends(module):
        kernel_for(session, backend)
    compare_settings(groups, config)
    installed = Installed(module, session, model_plan, plan, mlp_tiles)
    installed.install()
    if hasattr(type(module), "_parallel_config"):  # so that diffusers' own enable_parallelism refuses this model
        module._parallel_config = ParallelConfig(context_parallel_config=config)  # type: ignore[assignment]
    return installed


def remove_context_parallel(module: nn.Module) -> None:
    """Undo `apply_context_parallel` and restore the module.

    Raises: ValueError: the module is not context-parallel. PeerMismatchError: ranks of the context group got different
        data in the last forward; the module is restored in this case too.
    """
    module = unwrapped(module)  # without torch.compile's wrapper
    installed = installed_on(module)
    if installed is None:
        raise ValueError(f"{type(module).__name__} is not context-parallel: nothing to remove")
    installed.uninstall()
    module.__dict__.pop("_parallel_config", None)
    installed.session.peers.finish(within_s=1.0)


def _check_untouched(module: nn.Module) -> None:
    name = type(module).__name__
    if any(installed_on(inner) is not None for inner in module.modules()):
        raise PlanError(f"{name} is already context-parallel: call remove_context_parallel first")
    for inner in module.modules():
        is_parallel = any(kind == "parallel" for kind, _ in hooks_of(inner))
        if is_parallel or getattr(inner, "_parallel_config", None) is not None:
            raise PlanError(
                f"diffusers' own parallelism is enabled on {name}, which cannot be undone: load the model without "
                "parallel_config and without enable_parallelism, then call apply_context_parallel"
            )


def _check_heads(module: nn.Module, config: ContextParallelConfig) -> None:
    """Check the number of query heads, if it is known: otherwise the first forward does. Raises: ShapeError."""
    values = dict(getattr(module, "config", None) or {})
    named = [x for name in _HEADS if isinstance(x := values.get(name), int)]
    attentions = [x for x in module.modules() if hasattr(x, "set_processor")]
    counts = [getattr(x, "heads", getattr(x, "num_heads", None)) for x in attentions]
    heads = named or [n for n in counts if isinstance(n, int)]
    if heads and max(heads) < config.ulysses:
        raise ShapeError(
            f"ulysses_degree={config.ulysses} must be at most the number of query heads, {max(heads)}, of "
            f"{type(module).__name__}: use ring_degree for more ranks"
        )


_HEADS = ("num_attention_heads", "n_heads", "num_heads", "dit_heads")  # in configurations of diffusers' models


def no_plan_message(kind: type) -> str:
    """Return the error text for a class without a plan: the reason, what works instead, how to write a plan."""
    reason = refusal(kind)
    name = f"{kind.__module__}.{kind.__name__}"
    if reason is not None:
        return (
            f"{name} cannot run context-parallel: {reason}. Use data parallelism (ring=1, ulysses=1), or write a plan "
            "(docs/plans.md) and test it with lightning_cp.check_plan"
        )
    return (
        f"no plan is registered for {name}, only for the {len(REGISTERED)} classes of docs/models.md: write a plan "
        '(docs/plans.md; the simplest is plan={"": {"hidden_states": ContextParallelInput(split_dim=1, '
        'expected_dims=3)}, "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3)}) and test it with '
        "lightning_cp.check_plan"
    )


def _chosen_backends(module: nn.Module) -> set[Any]:
    processors = [getattr(inner, "processor", None) for inner in module.modules()]
    return {None} | {x for x in (getattr(p, "_attention_backend", None) for p in processors) if x is not None}
