"""Classifier-free guidance (CFG) parallelism: ranks on the `cfg` axis compute different branches of guidance.

Pipelines compute the branches in one of two ways, recognised from the transformer's arguments. Some repeat the latents
along the batch and call the transformer once: the batch is split. Others call it once per branch: the calls are
assigned to the branches round-robin and return a `LazyTensor` (`lazy_tensor.py`). Both give the same numbers as one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.shards import shard_sizes
from lightning_cp.comm.transforms import refuse_tangents
from lightning_cp.engine.apply import Installed
from lightning_cp.engine.caches import StepCaches
from lightning_cp.engine.hook_base import refuse_arguments
from lightning_cp.errors import GuidanceError
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.nest import of_type
from lightning_cp.pipelines.calls import arguments_by_name
from lightning_cp.pipelines.guidance.cfg_samples import cfg_merge, cfg_rows, is_repeated
from lightning_cp.pipelines.lazy_tensor import PendingGathers, resolve_all, with_buffers
from lightning_cp.pipelines.result_layout import Form, forget_oldest, form_and_tensors, key_of
from lightning_cp.pipelines.samples import divide_samples, join_samples, main_argument

_MAX_INCOMPLETE_EXCHANGES = 2


@dataclass(eq=False)
class BranchRunner:
    """Distributes the calls of a pipeline's transformers over the CFG branches.

    Attributes:
        name: class name of the pipeline, for errors.
        ranks: CFG, context and data groups of this rank.
        pending: results that other branches compute and that are not gathered yet.
        owners: branch that computes each `cache_context` while a step cache is on: only this branch has its cache.
        forms: form of the result by (module, shapes of arguments, autocast). All ranks compute the first call of each.
        incomplete_exchanges: number of consecutive exchanges with fewer calls than branches.
        shared: number of calls that were distributed over branches.
        is_active: True during a call of the pipeline.
        may_start_late: True if guidance may start after the first step.
        repeats: by (module, shapes of arguments), True if the latents of a call have several branches.
    """

    name: str
    ranks: SampleGroups
    pending: PendingGathers = field(init=False)
    owners: dict[str, int] = field(default_factory=dict)
    forms: dict[Any, Form] = field(default_factory=dict)
    incomplete_exchanges: int = 0
    shared: int = 0
    is_active: bool = False
    may_start_late: bool = False
    repeats: dict[Any, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pending = PendingGathers(self.ranks.cfg_groups, self.count_calls)

    def call(
        self, installed: Installed, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one transformer call, split or assigned to one branch. Ranks: all branches, with equal arguments."""
        module = installed.module
        args, kwargs = resolve_all((args, kwargs))
        self._refuse_arguments(installed, args, kwargs)
        main = main_argument(module, args, kwargs)
        if not is_repeated(main):
            return self._assign_to_branch(installed, compute, args, kwargs)
        self._share_samples(installed, len(main))
        local_args, local_kwargs = divide_samples(module, args, kwargs, self.ranks.cfg)[self.ranks.cfg_rank]
        with cfg_rows(module, self.ranks):
            return cfg_merge(compute(*local_args, **local_kwargs), self.ranks, like=main)

    def call_in_stages(
        self,
        installed: Installed,
        compute: Callable[[tuple[Any, ...], dict[str, Any], int | None], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one transformer call, split or assigned to one branch, with stages of blocks.

        Results stay lazy, and reach the other branches in pieces (`pipefusion/results.py`).

        Args: compute: gets arguments, and the branch that computes the call (None: branches take turns); returns lazy
            tensors.
        Ranks: all branches, with equal arguments.
        """
        module = installed.module
        arguments = with_buffers((args, kwargs))
        self._refuse_arguments(installed, *arguments)
        main, key = main_argument(module, args, kwargs), (id(module), key_of(arguments))
        if key not in self.repeats:  # not again: it reads the latents, so that the stages wait for each other
            self.repeats[key] = is_repeated(resolve_all(main))
        if not self.repeats[key]:
            return compute(args, kwargs, None)
        self._share_samples(installed, len(main))
        batches = divide_samples(module, args, kwargs, self.ranks.cfg)
        results = [compute(*batch, branch) for branch, batch in enumerate(batches)]
        return join_samples(results, shard_sizes(len(main), self.ranks.cfg))

    def begin(self, *, may_start_late: bool = False) -> None:
        """Reset the counters before a call of the pipeline."""
        self.incomplete_exchanges = self.shared = 0
        self.owners.clear()
        self.repeats.clear()
        forget_oldest(self.forms)
        self.is_active, self.may_start_late = True, may_start_late

    def end(self) -> None:
        """Drop pending results after a call of the pipeline, also if it raised."""
        self.pending.drop()
        self.is_active = False

    def _refuse_arguments(self, installed: Installed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse gradients (GuidanceError), tangents (NotImplementedError) and kept keys (ShapeError)."""
        module = installed.module
        if needs_gradients(module, (args, kwargs)):
            raise GuidanceError(
                f"cfg={self.ranks.cfg} is for sampling only, but {type(module).__name__} is called with gradients "
                "enabled: use torch.no_grad(), or cfg=1"
            )
        refuse_tangents(f"a pipeline with cfg={self.ranks.cfg}", *of_type(Tensor, (args, kwargs)))
        refuse_kept_keys(installed, args, kwargs, f"with cfg={self.ranks.cfg}")

    def _share_samples(self, installed: Installed, samples: int) -> None:
        """Count a call with the samples of several branches. Raises: GuidanceError: the samples cannot be divided."""
        if samples < self.ranks.cfg:
            raise self._too_many(samples)
        refuse_caches_of_both_branches(installed.caches, self.ranks.cfg)
        refuse_packed_samples(installed, self.ranks.cfg)
        self.shared += 1

    def _assign_to_branch(
        self, installed: Installed, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        key = (id(installed.module), key_of((args, kwargs)))
        context, form = context_of_branch(installed.caches, self.ranks.cfg), self.forms.get(key)
        is_new, turn = context not in self.owners, self._turn(context)
        if form is not None and turn != self.ranks.cfg_rank:
            if context is not None:
                installed.caches.forget(context)  # this rank misses a step of it
            return form.filled(self.pending.lazy_tensors(form.empty(), turn))
        actual, tensors = form_and_tensors(compute(*args, **kwargs))
        if form is None:
            form = self.forms[key] = actual
            return form.filled(self.pending.lazy_tensors(tensors, None if is_new else turn))
        assert actual.layout == form.layout, "arguments of equal shapes give results of equal shapes"
        return form.filled(self.pending.lazy_tensors(tensors, turn))

    def _turn(self, context: str | None) -> int:
        """Return the branch that computes this call: round-robin, but always the same for a `cache_context`."""
        if context is None:
            return len(self.pending.results) % self.ranks.cfg
        if context not in self.owners:
            taken = list(self.owners.values())
            self.owners[context] = min(range(self.ranks.cfg), key=taken.count)
        return self.owners[context]

    def count_calls(self, calls: int) -> None:
        """Count transformer calls, after the exchange of their results.

        Raises: GuidanceError: there are fewer calls than branches, so that some ranks have nothing to compute.
        """
        if not calls:
            return
        if calls >= self.ranks.cfg:
            self.shared += calls
        self.incomplete_exchanges = 0 if calls >= self.ranks.cfg else self.incomplete_exchanges + 1
        if not self.shared and not self.may_start_late and self.incomplete_exchanges == _MAX_INCOMPLETE_EXCHANGES:
            raise self._too_many(calls)

    def count_step(self, calls: int) -> None:
        """Count the transformer calls of a step in stages; calls outside of the pipeline have no steps."""
        if self.is_active:
            self.count_calls(calls)

    def _too_many(self, branches: int) -> GuidanceError:
        cfg = self.ranks.cfg
        if branches > 1:
            return GuidanceError(
                f"cfg={cfg}, but {self.name} computes {branches} branches of guidance: use cfg={branches}"
            )
        return GuidanceError(
            f"cfg={cfg}, but {self.name} computes one branch at a time: guidance is off (guidance_scale=1, or no "
            "negative prompt where one is needed), is built into the model, or needs one branch to compute the "
            "next. Use cfg=1, and use the ranks for ring or ulysses"
        )


def refuse_kept_keys(installed: Installed, args: tuple[Any, ...], kwargs: dict[str, Any], how: str) -> None:
    """Refuse calls that keep keys for later calls: each rank makes only some of these calls.

    Args: how: the setting that divides the calls. Raises: ShapeError.
    """
    refuse_arguments(installed.model_plan.keeps_keys, arguments_by_name(installed.signature, args, kwargs), how)


def refuse_packed_samples(installed: Installed, cfg: int) -> None:
    """Refuse a batch of branches if the plan says that its arguments cannot be divided. Raises: GuidanceError."""
    if installed.model_plan.patches is not None and not installed.model_plan.patches.samples:
        raise GuidanceError(
            f"cfg={cfg} divides the samples of a call, but the plan of {type(installed.module).__name__} says that its "
            "arguments cannot be divided by samples (samples=False): use cfg=1, and use the ranks for ring or ulysses"
        )


def refuse_unequal_lengths(installed: Installed, cfg: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse samples of different lengths in a call with patches: a branch would pad its own to another length.

    Raises: GuidanceError.
    """
    plan = installed.model_plan.patches
    if plan is None or plan.multiple is None:
        return
    for name, value in arguments_by_name(installed.signature, args, kwargs).items():
        texts = [x for x in value if isinstance(x, Tensor) and x.ndim == 2] if isinstance(value, list) else []
        if len({-(-len(x) // plan.multiple) for x in texts}) > 1:
            raise GuidanceError(
                f"cfg={cfg} with patches: {name} has samples of {', '.join(str(len(x)) for x in texts)} tokens, and "
                f"{type(installed.module).__name__} pads all samples of a call to the longest, in multiples of "
                f"{plan.multiple}. Each branch would pad only its own, so its patches would be others: use cfg=1 or "
                "patches=1, or prompts of similar lengths"
            )


def refuse_caches_of_both_branches(caches: StepCaches, cfg: int) -> None:
    """Refuse step caches that read both CFG branches: each rank has one of them. Raises: GuidanceError."""
    for watched in caches.hooks:
        if watched.cache.needs_both_branches and not watched.hook.is_guidance_distilled:
            raise GuidanceError(
                f"{watched.cache.name} computes the unconditional branch from the conditional one, but cfg={cfg} gives "
                "each rank one of them: use cfg=1, and use the ranks for ring or ulysses"
            )


def context_of_branch(caches: StepCaches, cfg: int) -> str | None:
    """Return the `cache_context` of a call that computes one branch; None if no step cache needs it.

    Raises: GuidanceError: a cache keeps one state for all branches, so a rank that computes one of them would skip
        other steps than one process.
    """
    context = caches.context
    for cache in caches.kinds:
        if cache.decides_by != "text" and (context is None or not cache.per_context):
            why = "the pipeline names no cache_context" if cache.per_context else "by design"
            raise GuidanceError(
                f"{cache.name} keeps one state for all branches of guidance ({why}), and cfg={cfg} computes them on "
                "different ranks: use cfg=1, and use the ranks for ring or ulysses"
            )
    return context


def guidance_may_start_late(pipe: Any, arguments: Mapping[str, Any]) -> bool:
    """Return True if guidance may start after the first step, because of the guider or of a start argument."""
    begins = [value for name, value in arguments.items() if "start" in name and ("cfg" in name or "guidance" in name)]
    begins.append(getattr(getattr(pipe, "guider", None), "_start", 0))
    return any(isinstance(value, (int, float)) and value > 0 for value in begins)


def needs_gradients(module: nn.Module, values: Any) -> bool:
    """Return True if gradients are enabled, and a weight or a tensor in `values` requires one."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in (*module.parameters(), *of_type(Tensor, values)))
