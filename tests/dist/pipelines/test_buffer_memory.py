"""Too little memory for the keys and values of patches is one error on all ranks, before a block runs."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from lightning_cp.engine.rules.paths import submodule
from lightning_cp.errors import CallFailedError, PlanError
from lightning_cp.pipelines import parallel_pipeline
from lightning_cp.pipelines.pipefusion import buffer_memory
from lightning_cp.pipelines.pipefusion.patch_runner import PatchRunner
from lightning_cp.pipelines.pipefusion.stages import blocks_of
from tests.dist.pipefusion import error_of, latents_of, make_pipe
from tests.harness import RankPool

_ENOUGH, _LITTLE = 10**15, 1000


def _patch_calls(pipe: Any) -> list[PatchRunner]:
    state = parallel_pipeline(pipe)
    assert state is not None
    return list(state.patch_runners.values())


def _count_blocks(pipe: Any) -> Counter[str]:
    """Counts the forwards of blocks that really run on this rank."""
    found: Counter[str] = Counter()
    for calls in _patch_calls(pipe):
        module = calls.installed.module
        for path in blocks_of(calls.installed):
            submodule(module, path).register_forward_pre_hook(lambda *_: found.update(["block"]))
    return found


def _free_bytes(values: list[int]) -> Callable[[torch.device], int]:
    """Free memory at each check; the last value stays."""
    return lambda device: values.pop(0) if len(values) > 1 else values[0]


def _full(
    rank: int, world: int, name: str, degrees: dict[str, int], settings: dict[str, Any], full: int, free: list[int]
) -> dict[str, Any]:
    """One rank has little memory in one call. Returns: what is raised, forwards of blocks, error of the next call."""
    pipe, fresh = make_pipe(name), make_pipe(name)
    for one in (pipe, fresh):
        parallelize_pipeline(one, ContextParallelConfig(**degrees), **settings)
    blocks = _count_blocks(pipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_memory, "free_bytes", _free_bytes(list(free) if rank == full else [_ENOUGH]))
        with pytest.raises((PlanError, CallFailedError)) as error:
            latents_of(pipe, name)
    ran = blocks.total()
    return {
        "kind": type(error.value).__name__,
        "text": str(error.value),
        "blocks": ran,
        "next": error_of(latents_of(fresh, name), latents_of(pipe, name)),
    }


# name, ranks, degrees, settings, the rank with little memory, the ranks that raise its error themselves
_CASES: dict[str, tuple[str, int, dict[str, int], dict[str, Any], int, tuple[int, ...]]] = {
    "last_stage": ("flux", 2, {}, {"pipe": 2}, 1, (1,)),
    "first_stage": ("flux", 3, {}, {"pipe": 3}, 0, (0,)),
    "ring": ("flux", 3, {"ring_degree": 3}, {}, 1, (0, 1, 2)),
    "ulysses_in_stages": ("flux", 4, {"ulysses_degree": 2}, {"pipe": 2}, 3, (2, 3)),
    "branches": ("flux_true_cfg", 2, {}, {"cfg": 2}, 1, (1,)),
    "batch": ("sd3", 4, {}, {"cfg": 2, "pipe": 2}, 2, (2,)),
}
_DEFAULT = ("last_stage",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in _DEFAULT else pytest.mark.full) for case in _CASES]
)
def test_too_little_memory_is_one_error_before_a_block_runs(run_ranks: RankPool, case: str) -> None:
    name, world, degrees, settings, full, raise_it = _CASES[case]
    found = run_ranks(world, _full, name, degrees, {**settings, "patches": 3}, full, [_LITTLE])
    for rank, one in enumerate(found):
        assert one["kind"] == ("PlanError" if rank in raise_it else "CallFailedError")
        assert re.search(
            rf"patches=3: the keys and values of \d blocks of \w+ on rank {full} need .* GB for one branch of "
            r"guidance, but cpu has .* GB of free memory: use more stages",
            one["text"],
        )
        assert one["blocks"] == 0
        assert one["next"] == 0


@pytest.mark.parametrize("full", [0, pytest.param(1, marks=pytest.mark.full)])
def test_memory_for_one_branch_only_is_an_error_in_the_first_step(run_ranks: RankPool, full: int) -> None:
    """The number of branches is known when the second one begins."""
    found = run_ranks(2, _full, "flux_true_cfg", {}, {"pipe": 2, "patches": 2}, full, [_ENOUGH, _LITTLE])
    for rank, one in enumerate(found):
        assert one["kind"] == ("PlanError" if rank == full else "CallFailedError")
        assert f"on rank {full} need" in one["text"]
        assert one["blocks"] <= 2 * 3  # one evaluation of one branch, and the other stage's of the second
        assert one["next"] == 0


def _too_little_for_two(rank: int, world: int, cfg: int) -> tuple[str, int]:
    """What is raised if the memory is enough for one and a half branches of Wan; and forwards of blocks."""
    pipe = make_pipe("wan")
    parallelize_pipeline(pipe, ContextParallelConfig(), pipe=world // cfg, cfg=cfg, patches=2)
    latents_of(pipe, "wan")
    (calls,) = _patch_calls(pipe)
    (needed,) = calls.memory.needed.values()
    assert needed is not None
    blocks = _count_blocks(pipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_memory, "free_bytes", lambda device: needed * 3 // 2)
        try:
            latents_of(pipe, "wan")
        except (PlanError, CallFailedError) as error:
            return str(error), blocks.total()
    return "", blocks.total()


def test_two_branches_are_counted_at_once_where_the_pipeline_says_so(run_ranks: RankPool) -> None:
    for text, ran in run_ranks(2, _too_little_for_two, 1):
        assert "GB for 2 branches of guidance" in text
        assert ran == 0
    for text, ran in run_ranks(2, _too_little_for_two, 2):
        assert text == ""  # a rank has one branch
        assert ran > 0


def _uncounted(rank: int, world: int) -> tuple[str, str]:
    pipe = make_pipe("flux")
    parallelize_pipeline(pipe, ContextParallelConfig(), pipe=world, patches=2)

    def reads_values(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a tensor without storage has no values")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_memory, "count_without_storage", reads_values)
        patch.setattr(buffer_memory, "free_bytes", lambda device: _LITTLE if rank else _ENOUGH)
        with pytest.raises((PlanError, CallFailedError)) as error:
            latents_of(pipe, "flux")
    return type(error.value).__name__, str(error.value)


@pytest.mark.full
def test_a_model_that_reads_values_is_checked_after_its_first_block(run_ranks: RankPool) -> None:
    for rank, (kind, text) in enumerate(run_ranks(2, _uncounted)):
        assert kind == ("PlanError" if rank else "CallFailedError")
        assert "FluxTransformer2DModel on rank 1 need" in text


def _held(rank: int, world: int, name: str, degrees: dict[str, int], settings: dict[str, Any]) -> list[tuple[int, int]]:
    """For each branch of this rank's transformers: bytes counted before its first evaluation, and bytes held."""
    pipe, held = make_pipe(name), list[tuple[int, int]]()
    parallelize_pipeline(pipe, ContextParallelConfig(**degrees), **settings)
    transformers = _patch_calls(pipe)
    ends = [calls.end for calls in transformers]

    def end() -> None:
        for calls, one_end in zip(transformers, ends, strict=True):
            filled = [
                [x for buffer in b.evaluation.buffers for x in buffer.tensors] for b in calls.branches.known.values()
            ]
            counted = [x for x in calls.memory.needed.values() if x is not None]
            held.extend((counted[0], sum(x.nbytes for x in tensors)) for tensors in filled if tensors)
            one_end()

    transformers[0].end = end  # type: ignore[method-assign]
    latents_of(pipe, name)
    return held


@pytest.mark.parametrize(
    ("name", "world", "degrees", "settings"),
    [
        pytest.param("flux", 2, {}, {"pipe": [1, 3]}, id="stages"),
        pytest.param("flux", 3, {"ulysses_degree": 3}, {}, marks=pytest.mark.full, id="ulysses"),
        pytest.param("wan", 4, {"ring_degree": 2, "ulysses_degree": 2}, {}, marks=pytest.mark.full, id="both"),
        pytest.param("hunyuan_video", 2, {}, {"pipe": 2}, marks=pytest.mark.full, id="masked"),
        pytest.param("sana", 2, {"ulysses_degree": 2}, {}, id="linear"),
        pytest.param("wan", 2, {}, {"cfg": 2}, id="branches"),
    ],
)
def test_the_counted_bytes_are_the_held_ones(
    run_ranks: RankPool, name: str, world: int, degrees: dict[str, int], settings: dict[str, Any]
) -> None:
    """A CFG rank holds the keys of its own branch only."""
    for held in run_ranks(world, _held, name, degrees, {**settings, "patches": 2}):
        assert len(held) == (2 if name == "wan" and "cfg" not in settings else 1)
        assert all(counted == filled for counted, filled in held)


def _held_by_experts(rank: int, world: int) -> list[int]:
    """Number of branches whose keys each transformer holds at the end of a call."""
    pipe, found = make_pipe("wan_two_experts"), list[int]()
    parallelize_pipeline(pipe, ContextParallelConfig(), patches=2, pipe=world)
    first, second = _patch_calls(pipe)
    end = first.end

    def count() -> None:
        found.extend(len(calls.branches.known) for calls in (first, second))
        end()

    first.end = count  # type: ignore[method-assign]
    latents_of(pipe, "wan_two_experts")
    return found


def test_an_expert_frees_the_keys_of_the_one_before(run_ranks: RankPool) -> None:
    assert run_ranks(2, _held_by_experts) == [[0, 2], [0, 2]]


def _with_an_added_block(rank: int, world: int) -> float:
    """The error of a model with more blocks than its configuration has."""
    pipes = [make_pipe("flux") for _ in range(2)]
    for pipe in pipes:
        blocks = pipe.transformer.single_transformer_blocks
        blocks.append(copy.deepcopy(blocks[0]))
    alone, staged = pipes
    parallelize_pipeline(alone, ContextParallelConfig(mesh=None), patches=2)
    parallelize_pipeline(staged, ContextParallelConfig(), patches=2, pipe=world)
    return error_of(latents_of(alone, "flux"), latents_of(staged, "flux"))


@pytest.mark.full
def test_a_model_with_more_blocks_than_its_configuration_is_not_counted(run_ranks: RankPool) -> None:
    assert max(run_ranks(2, _with_an_added_block)) < 1e-12


def _stale(rank: int, world: int) -> float:
    """The error of a call, if the stages have errors of a call that failed before they were reported."""
    pipe, fresh = make_pipe("wan_two_experts"), make_pipe("wan_two_experts")
    for one in (pipe, fresh):
        parallelize_pipeline(one, ContextParallelConfig(), patches=2, pipe=world)
    for calls in _patch_calls(pipe):
        assert calls.stage is not None
        calls.stage.error = PlanError("of a call that has failed")
    return error_of(latents_of(fresh, "wan_two_experts"), latents_of(pipe, "wan_two_experts"))


@pytest.mark.full
def test_an_error_of_an_earlier_call_is_forgotten(run_ranks: RankPool) -> None:
    assert run_ranks(2, _stale) == [0, 0]
