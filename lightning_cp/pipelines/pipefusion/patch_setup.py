"""Set up the computation of a pipeline's transformers in patches and stages of blocks; refuse what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from lightning_cp.engine.installed import Installed
from lightning_cp.engine.rules.paths import submodule
from lightning_cp.errors import PlanError
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.guidance.step_clock import StepClock
from lightning_cp.pipelines.pipefusion.patch_branches import PatchBranches
from lightning_cp.pipelines.pipefusion.patch_runner import PatchRunner
from lightning_cp.pipelines.pipefusion.result_transfers import ResultTransfers
from lightning_cp.pipelines.pipefusion.stage_results import StageResults
from lightning_cp.pipelines.pipefusion.stages import blocks_of, make_stage


def make_patch_runners(
    transformers: Mapping[str, Installed],
    ranks: SampleGroups,
    votes: Votes,
    *,
    pipe: int | Sequence[int],
    patches: int,
    warmup: int,
    clock: StepClock,
    experts: Collection[str] = (),
    on_step: Callable[[int], None] = lambda calls: None,
) -> dict[str, PatchRunner]:
    """Prepare all transformers of a pipeline; none if neither patches nor stages are used.

    Args:
        experts: names of the transformers, if each of them computes some of the steps.
        on_step: with stages, called with the number of transformer calls of each step.
    Raises: PlanError: a class cannot be computed in patches or stages, or has a step cache. ValueError: more stages
        than blocks.
    """
    if ranks.pipe == patches == 1:
        return {}
    patch_runners = {}
    results = None
    if ranks.pipe_results:
        assert ranks.control is not None, "several ranks share a sample"
        transfers = ResultTransfers(ranks.stages, ranks.pipe_results, ranks.control, ranks.cfg_rank)
        results = StageResults(transfers, votes, on_step)
    for name, installed in transformers.items():
        kind, plan = type(installed.module).__name__, installed.rules.patches
        if plan is None:
            raise PlanError(
                f"{kind} cannot be computed in patches or stages: its plan does not support it "
                "(docs/pipefusion_reference.md lists the classes that do): use patches=1 and pipe=1"
            )
        if ranks.pipe > 1 and not plan.stages:
            raise PlanError(
                f"pipe={ranks.pipe}: {kind} needs outputs or weights of other blocks than the one before, so its "
                "blocks cannot be divided into stages: use pipe=1"
            )
        refuse_caches(installed)
        for path in ("", *blocks_of(installed)):
            if submodule(installed.module, path).__dict__.get("_compiled_call_impl") is not None:
                what = f"{path} of {kind}" if path else kind
                raise PlanError(f"{what} is compiled, which patches and stages do not support: do not compile it")
        counts = None if isinstance(pipe, int) else pipe
        stage = None if results is None else make_stage(installed, ranks.stages, transfers.control, counts)
        branches = PatchBranches(installed, patches, clock, ranks.cfg)
        patch_runners[name] = PatchRunner(installed, patches, warmup, branches, stage, results)
    for name in experts:
        patch_runners[name].branches.experts = [patch_runners[other].branches for other in experts if other != name]
    return patch_runners


def refuse_caches(installed: Installed) -> None:
    """Refuse step caches on a transformer that is computed in patches or stages. Raises: PlanError."""
    installed.caches.follow()
    if installed.caches:
        raise PlanError(
            f"{installed.caches.kinds[0].name} on {type(installed.module).__name__} with pipe or patches above 1: step "
            "caches expect one forward for each step, over all blocks: call disable_cache(), or leave out pipe and "
            "patches"
        )
