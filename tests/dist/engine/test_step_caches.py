"""diffusers' step caches on a parallel model take one process' decisions, and give its outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import apply_first_block_cache

from lightning_cp import apply_context_parallel, remove_context_parallel
from lightning_cp.compat.diffusers_names import hooks_of
from lightning_cp.errors import PeerMismatchError, ShapeError
from lightning_cp.pipelines import cfg_merge, cfg_rows, cfg_split, sampling_ranks
from tests.dist.compare import of_first_rank
from tests.dist.step_caches import STEPS, Clock, config, loop, shorter
from tests.harness import RankPool
from tests.models.modes import MODES

CONTEXTS = ("cond", "uncond")
SAMPLES = (tuple(range(STEPS)), (0, 1, 2))  # the steps of two samples in a row


def _model(name: str) -> tuple[Any, dict[str, Any]]:
    tiny = shorter(name)
    return tiny.build(), tiny.arguments()


def _enable(model: Any, cache: str, clock: Clock, *, directly: bool = False) -> None:
    if directly:
        assert cache == "first_block"
        apply_first_block_cache(model, config(cache, clock))
    else:
        model.enable_cache(config(cache, clock))


def _contexts(cache: str) -> tuple[str, ...]:
    return ("cond",) if cache in ("broadcast", "faster") else CONTEXTS  # those share one state between branches


def _trials(
    rank: int, world: int, name: str, cache: str, mode: str, before: bool
) -> list[tuple[bool, list[bool], float]]:
    """Whether each rank computed what one process did; what that skipped; the error. Two samples in a row."""
    found = []
    clock = Clock()
    model, arguments = _model(name)
    _enable(model, cache, clock)
    alone = []
    for steps in SAMPLES:
        run_alone = partial(loop, model, arguments, clock, contexts=_contexts(cache), steps=steps)
        alone.append(of_first_rank(run_alone))
        model._reset_stateful_cache()
    model, arguments = _model(name)
    if before:
        _enable(model, cache, clock)
        loop(model, arguments, clock, contexts=_contexts(cache), steps=(0, 1))  # whole tokens are not kept
    apply_context_parallel(model, MODES[mode](world))
    if not before:
        _enable(model, cache, clock)
    for steps, expected in zip(SAMPLES, alone, strict=True):
        run = loop(model, arguments, clock, contexts=_contexts(cache), steps=steps)
        found.append((run.ran == expected.ran, expected.skips, run.error(expected)))
        model._reset_stateful_cache()
    model.disable_cache()
    loop(model, arguments, clock, steps=(0,))
    remove_context_parallel(model)
    return found


TRIALS = [  # model, cache, mode, world, and whether the cache is there before the plan
    ("flux", "first_block", "ulysses", 3, True),
    ("cogvideox", "first_block", "unified", 4, True),
    ("ltx", "first_block", "ring", 3, False),
    ("hunyuan_video", "first_block", "ulysses", 3, True),
    ("qwen_image", "first_block", "ring", 3, False),
    ("mochi", "first_block", "ulysses", 3, True),
    ("cogview4", "first_block", "ring", 3, False),
    ("motif_video_without_mask", "first_block", "ring", 3, True),
    ("wan", "first_block", "grid", 4, False),
    ("flux", "mag", "rotation", 3, True),
    ("kandinsky5", "mag", "ring", 3, False),
    ("wan", "taylorseer", "ring", 3, True),
    ("flux", "taylorseer_lite", "ring", 3, False),
    ("wan", "broadcast", "unified", 4, True),
    ("wan", "faster", "ring", 3, False),
    ("wan", "sea", "unified", 4, True),
    ("cosmos3", "sea", "ulysses", 3, False),
    ("nucleus_moe", "text", "ring", 3, True),
]


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: "-".join(map(str, trial)))
@pytest.mark.default("flux-first", "cosmos3-sea", "nucleus_moe-text")
def test_decisions_and_outputs_are_those_of_one_process(
    run_ranks: RankPool, trial: tuple[str, str, str, int, bool]
) -> None:
    name, cache, mode, world, before = trial
    for found in run_ranks(world, _trials, name, cache, mode, before, timeout_s=120):
        for same, _, error in found:
            assert same
            assert error < 1e-9
        skips = found[0][1]
        assert any(skips)
        assert cache == "text" or not all(skips[len(_contexts(cache)) :])


def _at_the_threshold(rank: int, world: int, name: str, mode: str, cfg: int) -> list[bool]:
    """Whether a step is skipped if its change is a millionth above the threshold, and a millionth below."""
    model, arguments = _model(name)
    model.enable_cache(FirstBlockCacheConfig(threshold=-1.0))  # computes all steps
    residuals = []
    for step in (0, 1):
        loop(model, arguments, Clock(), steps=(step,))
        hooks = (hook for module in model.modules() for _, hook in hooks_of(module))
        hook = next(hook for hook in hooks if type(hook).__name__ == "FBCHeadBlockHook")
        residuals.append(hook.state_manager._state_cache["cond"].head_block_residual)
    before, after = residuals
    change = float((after - before).abs().mean() / before.abs().mean())
    model, arguments = _model(name)
    parallel = MODES[mode](world // cfg)
    ranks = sampling_ranks(parallel, cfg=cfg)
    apply_context_parallel(model, parallel)

    def call(given: dict[str, Any]) -> Any:
        with cfg_rows(model, ranks):
            return cfg_merge(model(**cfg_split(given, ranks), return_dict=False)[0], ranks)

    skipped = []
    for factor in (1 - 1e-6, 1 + 1e-6):
        model.enable_cache(FirstBlockCacheConfig(threshold=change * factor))
        skipped.append(loop(model, arguments, Clock(), steps=(0, 1), call=call).skips[1])
        model.disable_cache()
    return skipped


@pytest.mark.parametrize(
    ("name", "mode", "world", "cfg"), [("wan", "ring", 3, 1), ("wan", "ring", 4, 2), ("cogvideox", "unified", 4, 1)]
)
@pytest.mark.default(1)
def test_the_decision_is_that_of_all_tokens_and_rows(
    run_ranks: RankPool, name: str, mode: str, world: int, cfg: int
) -> None:
    assert run_ranks(world, _at_the_threshold, name, mode, cfg) == [[False, True]] * world


def _ratios(rank: int, world: int, mode: str) -> tuple[list[float], list[float]]:
    """Calibrated ratios of one process, and of ranks."""
    found = []
    for parallel in (False, True):
        model, arguments = _model("wan")
        if parallel:
            apply_context_parallel(model, MODES[mode](world))
        model.enable_cache(config("mag_calibration", Clock()))
        loop(model, arguments, Clock())
        states = model.blocks[0]._diffusers_hook.hooks["mag_cache_leader_block_hook"].state_manager._state_cache
        found.append(states["cond"].calibration_ratios)
    return found[0], found[1]


def test_calibration_of_mag_cache_averages_over_all_tokens(run_ranks: RankPool) -> None:
    for alone, together in run_ranks(3, _ratios, "ring"):
        assert len(alone) == STEPS
        assert together == pytest.approx(alone, rel=1e-6)  # diffusers computes norms in float32
        assert len({*alone}) > 2


def _interrupted(rank: int, world: int, cache: str) -> tuple[bool, float]:
    """A loop that ends in a block of its fourth step, then a whole loop."""
    clock = Clock()
    model, arguments = _model("wan")
    _enable(model, cache, clock)
    expected = loop(model, arguments, clock)
    model, arguments = _model("wan")
    apply_context_parallel(model, MODES["ring"](world))
    _enable(model, cache, clock)
    loop(model, arguments, clock, steps=(0, 1, 2))
    handle = model.proj_out.register_forward_hook(_raise)
    with pytest.raises(KeyboardInterrupt):
        loop(model, arguments, clock, steps=(3,))
    handle.remove()
    run = loop(model, arguments, clock)
    return run.ran == expected.ran, run.error(expected)


def _raise(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_loop_after_an_interrupted_one_starts_with_empty_caches(run_ranks: RankPool) -> None:
    for same, error in run_ranks(3, _interrupted, "first_block"):
        assert same
        assert error < 1e-9


def _refusals(rank: int, world: int) -> list[str]:
    """What is said on each rank when states differ, when sizes change, and when a residual does not fit."""
    said, clock = [], Clock()
    model, arguments = _model("wan")
    apply_context_parallel(model, MODES["ring"](world))
    _enable(model, "first_block", clock)
    loop(model, arguments, clock, steps=(0, 1))
    if rank == 1:
        model._reset_stateful_cache()
    with pytest.raises(PeerMismatchError) as error:
        loop(model, arguments, clock, steps=(2,))
    said.append(str(error.value))
    model.disable_cache()
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1 + rank % 2))
    with pytest.raises(PeerMismatchError) as error:
        loop(model, arguments, clock, steps=(0,))
    said.append(str(error.value))
    # Each cache, on other shards of the last rank only: 7 + 7 + 6 tokens, then 7 + 7 + 7.
    larger = {**arguments, "hidden_states": torch.randn(2, 4, 1, 6, 14, dtype=torch.float64)}
    for cache in ("first_block", "mag", "taylorseer", "broadcast"):
        model.disable_cache()
        _enable(model, cache, clock)
        loop(model, arguments, clock, steps=(0, 1))
        with pytest.raises(ShapeError) as wrong:
            loop(model, larger, clock, steps=(2,))
        said.append(str(wrong.value))
    return said


def test_what_one_process_could_not_continue_is_an_error_on_every_rank(run_ranks: RankPool) -> None:
    for said in run_ranks(3, _refusals):
        assert "FirstBlockCache of the ranks that share a sample are at different steps" in said[0]
        assert "FirstBlockCache of the ranks that share a sample have different settings" in said[1]
        for text, name in zip(said[2:], ("FirstBlockCache", "MagCache", "TaylorSeer", "PyramidAttention"), strict=True):
            assert text.startswith(name)
            assert "keeps results for {'image': 20} tokens, but this step has {'image': 21}" in text


def _compiled(rank: int, world: int, cache: str) -> tuple[bool, float]:
    clock = Clock()
    model, arguments = _model("wan")
    _enable(model, cache, clock)
    expected = loop(model, arguments, clock, float64=False)
    model, arguments = _model("wan")
    apply_context_parallel(model, MODES["ring"](world))
    _enable(model, cache, clock)
    model.compile_repeated_blocks(backend="aot_eager")
    run = loop(model, arguments, clock, float64=False)
    return [bool(x) for x in run.skips] == expected.skips, run.error(expected)


@pytest.mark.full
def test_caches_of_compiled_blocks(run_ranks: RankPool) -> None:
    for same, error in run_ranks(3, _compiled, "first_block", timeout_s=240):
        assert same
        assert error < 1e-5
