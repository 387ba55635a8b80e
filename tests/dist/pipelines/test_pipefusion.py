"""PipeFusion: the result depends on patches and warm-up only, not on stages, ring, Ulysses or CFG degrees."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from diffusers import FirstBlockCacheConfig

from lightning_cp import ContextParallelConfig, parallelize_pipeline, unparallelize_pipeline
from lightning_cp.errors import CallFailedError, GuidanceError, PlanError, ShapeError
from lightning_cp.pipelines import parallel_pipeline
from lightning_cp.undoable import intercept_method
from tests.dist.compare import of_first_rank
from tests.dist.pipefusion import STEPS
from tests.dist.pipefusion import latents_of as _latents
from tests.dist.pipefusion import make_pipe as _pipe
from tests.harness import RankPool
from tests.pipelines.tiny import error_of as _error


def _compare(rank: int, world: int, name: str, degrees: dict[str, int], settings: dict[str, Any]) -> dict[str, float]:
    """Largest relative errors against one process with the same patches, and against it without patches."""
    alone, plain = _pipe(name), _pipe(name)
    without = of_first_rank(lambda: _latents(plain, name))
    patches = {key: settings[key] for key in ("patches", "warmup") if key in settings}
    parallelize_pipeline(alone, ContextParallelConfig(mesh=None), **patches)
    expected = of_first_rank(lambda: _latents(alone, name))
    pipe = _pipe(name)
    parallelize_pipeline(pipe, ContextParallelConfig(**degrees), **settings)
    found, again = _latents(pipe, name), _latents(pipe, name)
    installed = parallel_pipeline(pipe)
    assert installed is not None
    weights = sum(p.numel() for p in pipe.transformer.parameters()) / sum(
        p.numel() for p in plain.transformer.parameters()
    )
    return {
        "error": _error(expected, found),
        "again": _error(found, again),
        "plain": _error(without, found),
        "weights": weights,
    }


_CASES = {
    "flux_stages3": ("flux", 3, {}, {"pipe": 3, "patches": 4, "warmup": 2}),
    "flux_exact": ("flux", 2, {}, {"pipe": [1, 3], "patches": 1}),
    "flux_cfg": ("flux_true_cfg", 4, {}, {"pipe": 2, "patches": 3, "cfg": 2}),
    "sd3_cfg_ring": ("sd3", 4, {"ring_degree": 2}, {"patches": 2, "cfg": 2}),
    "flux_grid": ("flux", 4, {"ring_degree": 4, "rotate_method": "grid"}, {"patches": 3}),
    "hunyuan_ulysses": ("hunyuan_video", 4, {"ulysses_degree": 2}, {"pipe": 2, "patches": 3}),
    "controlnet": ("flux_controlnet", 3, {}, {"pipe": 3, "patches": 2}),
    "outer_mask_ulysses": ("cogview4", 4, {"ulysses_degree": 2}, {"pipe": 2, "patches": 3}),
    "rows_ring": ("sana", 4, {"ring_degree": 2}, {"pipe": 2, "patches": 2}),
    "frames_ring": ("sana_video", 4, {"ring_degree": 2}, {"pipe": 2, "patches": 2}),
    "pyramid_ring": ("helios_pyramid", 3, {"ring_degree": 3}, {"patches": 2}),
    "windows_ring": ("ltx_long", 3, {"ring_degree": 3}, {"patches": 2}),
    "two_experts": ("wan_two_experts", 2, {}, {"pipe": 2, "patches": 2}),
}


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.default("flux_stages3")
def test_the_result_depends_on_patches_and_warmup_only(run_ranks: RankPool, case: str) -> None:
    name, world, degrees, settings = _CASES[case]
    for found in run_ranks(world, _compare, name, degrees, settings):
        assert found["error"] < 1e-12
        assert found["again"] == 0
        if settings["patches"] > 1:
            assert found["plain"] > 1e-9  # keys of the previous step were used
        else:
            assert found["plain"] < 1e-12
        if "pipe" in settings:
            assert found["weights"] < 1


@pytest.mark.parametrize("name", ["flux", "helios_pyramid", "ltx_long"])
@pytest.mark.default(1)
def test_whole_evaluations_only_are_exact(name: str) -> None:
    """Each window of a long video, and each resolution of a pyramid, has a denoising loop with other tokens."""
    plain, pipe = _pipe(name), _pipe(name)
    parallelize_pipeline(pipe, ContextParallelConfig(), patches=3, warmup=STEPS)
    assert _error(_latents(plain, name), _latents(pipe, name)) == 0
    unparallelize_pipeline(pipe)
    assert torch.equal(_latents(plain, name), _latents(pipe, name))


def _too_many_patches(rank: int, world: int) -> tuple[str, bool]:
    """The error of a call whose first resolution has fewer tokens than patches; whether the next call is as before."""
    alone, pipe = _pipe("helios_pyramid"), _pipe("helios_pyramid")
    parallelize_pipeline(alone, ContextParallelConfig(mesh=None), patches=6)
    parallelize_pipeline(pipe, ContextParallelConfig(), pipe=2, cfg=world // 2, patches=6)
    short = {"num_inference_steps": 2}  # of each resolution
    with pytest.raises((ShapeError, CallFailedError)) as raised:  # of this branch of guidance, or of the other one
        _latents(pipe, "helios_pyramid", width=64, **short)
    expected = of_first_rank(lambda: _latents(alone, "helios_pyramid", **short))
    return str(raised.value), _error(expected, _latents(pipe, "helios_pyramid", **short)) < 1e-12


@pytest.mark.full
def test_more_patches_than_tokens_of_the_first_resolution_raise_on_all_ranks(run_ranks: RankPool) -> None:
    for said, works in run_ranks(4, _too_many_patches):
        assert "holds 3 image tokens, fewer than patches=6 x ring=1 x ulysses=1: use fewer patches" in said
        assert works


@pytest.mark.full
def test_other_sizes_and_an_interrupted_call_leave_nothing() -> None:
    pipe, fresh = _pipe("flux"), _pipe("flux")
    for one in (pipe, fresh):
        parallelize_pipeline(one, ContextParallelConfig(), patches=3)

    def stop(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        raise KeyboardInterrupt

    _latents(pipe, "flux", height=20, width=12)
    with pytest.raises(KeyboardInterrupt):
        _latents(pipe, "flux", callback_on_step_end=stop)
    assert torch.equal(_latents(pipe, "flux"), _latents(fresh, "flux"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patches": "3"}, "patches='3' must be an integer"),
        ({"pipe": 2}, "pipe=2 needs a process group"),
        ({"pipe": 2, "shard": ["transformer"]}, "leave one of them out"),
    ],
)
def test_bad_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        parallelize_pipeline(_pipe("flux"), ContextParallelConfig(), **settings)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(("name", "scheduler"), [("pixart_alpha", "DDIMScheduler"), ("longcat_audio", "")])
def test_the_step_of_any_scheduler_ends_a_step(name: str, scheduler: str) -> None:
    """A scheduler that is exchanged after `parallelize_pipeline`, and one that is no component of its pipeline."""
    pipe = _pipe(name)
    parallelize_pipeline(pipe, ContextParallelConfig(), patches=2)
    if scheduler:
        pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config)
    state, counts = parallel_pipeline(pipe), []
    assert state is not None
    (calls,) = state.patch_runners.values()
    intercept_method(
        calls.branches,
        "current",
        lambda call, *_: counts.append(len(calls.branches.known)) or call(),  # type: ignore[func-returns-value]
    )
    _latents(pipe, name)
    assert len(counts) >= STEPS
    assert max(counts) <= 2


def test_a_class_that_is_not_proven_is_refused() -> None:
    with pytest.raises(PlanError, match="ChromaTransformer2DModel cannot be computed in patches"):
        parallelize_pipeline(_pipe("chroma"), ContextParallelConfig(), patches=2)


_CACHED = "FirstBlockCache on FluxTransformer2DModel with pipe or patches above 1"


def test_a_step_cache_is_refused_before_and_after() -> None:
    pipe = _pipe("flux")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(PlanError, match=_CACHED):
        parallelize_pipeline(pipe, ContextParallelConfig(), patches=2)
    _latents(pipe, "flux")  # as before
    pipe.transformer.disable_cache()
    parallelize_pipeline(pipe, ContextParallelConfig(), patches=2)
    expected = _latents(pipe, "flux")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(PlanError, match=_CACHED):
        _latents(pipe, "flux")
    with pytest.raises(PlanError, match=_CACHED):
        pipe.transformer()
    pipe.transformer.disable_cache()
    assert torch.equal(_latents(pipe, "flux"), expected)


def _guided_in_some_steps(rank: int, world: int) -> tuple[float, str]:
    """Error of stages without patches, and the refusal of patches, where steps differ in calls."""
    settings = {"skip_guidance_layers": [9], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 0.5}
    expected = _latents(_pipe("sd3"), "sd3", **settings)
    staged, patched = _pipe("sd3"), _pipe("sd3")
    parallelize_pipeline(staged, ContextParallelConfig(), pipe=world)
    parallelize_pipeline(patched, ContextParallelConfig(), pipe=world, patches=2)
    error = _error(expected, _latents(staged, "sd3", **settings))
    with pytest.raises(GuidanceError) as refusal:
        _latents(patched, "sd3", **settings)
    return error, str(refusal.value)


@pytest.mark.full
def test_stages_without_patches_allow_guidance_in_some_steps(run_ranks: RankPool) -> None:
    for error, refusal in run_ranks(3, _guided_in_some_steps):
        assert error < 1e-12
        assert "use patches=1, or guidance in all steps" in refusal


def _in_inference_mode(rank: int, world: int, name: str, settings: dict[str, Any]) -> list[float]:
    """Errors of three calls: steps overlap from the second or third one on."""
    alone, pipe = _pipe(name), _pipe(name)
    parallelize_pipeline(alone, ContextParallelConfig(mesh=None), patches=settings.get("patches", 1))
    parallelize_pipeline(pipe, ContextParallelConfig(), **settings)
    with torch.inference_mode():
        expected = _latents(alone, name)
        return [_error(expected, _latents(pipe, name)) for _ in range(3)]


def test_inference_mode_changes_nothing(run_ranks: RankPool) -> None:
    """Lazy tensors get whole operators there: some views of them are copies."""
    trials = {"wan": {"pipe": 2, "patches": 2}, "ltx": {"pipe": 2}, "cogvideox": {"cfg": 2, "patches": 2}}
    for name, settings in trials.items():
        for errors in run_ranks(2, _in_inference_mode, name, settings):
            assert max(errors) < 1e-12, name


def _own_loop(rank: int, world: int, settings: dict[str, Any]) -> float:
    """The largest difference of four calls of the transformer outside of its pipeline."""
    plain, pipe, given = _pipe("flux"), _pipe("flux"), []
    intercept_method(plain.transformer, "forward", lambda call, _, kwargs: given.append(kwargs) or call(**kwargs))
    _latents(plain, "flux")
    parallelize_pipeline(pipe, ContextParallelConfig(), **settings)
    with torch.no_grad():
        pairs = [(plain.transformer(**kwargs)[0], pipe.transformer(**kwargs)[0]) for kwargs in given[:STEPS]]
    return max(_error(expected, found) for expected, found in pairs)


@pytest.mark.parametrize("settings", [{"cfg": 2, "patches": 2}, {"pipe": 2}])
@pytest.mark.default(1)
def test_calls_outside_of_the_pipeline_are_whole(run_ranks: RankPool, settings: dict[str, Any]) -> None:
    assert max(run_ranks(2, _own_loop, settings)) < 1e-12


def _unequal_lengths(rank: int, world: int) -> tuple[str, float]:
    """The refusal, and the error with one length of all texts."""
    pipe, alone = _pipe("z_image"), _pipe("z_image")
    parallelize_pipeline(alone, ContextParallelConfig(mesh=None), patches=2)
    parallelize_pipeline(pipe, ContextParallelConfig(), patches=2, cfg=world)
    with pytest.raises((GuidanceError, CallFailedError)) as refusal:
        _latents(pipe, "z_image", prompt="a cat on a wall " * 20, negative_prompt="ugly")
    return str(refusal.value), _error(_latents(alone, "z_image"), _latents(pipe, "z_image"))


def test_branches_that_would_be_padded_to_other_lengths_are_refused(run_ranks: RankPool) -> None:
    for said, error in run_ranks(2, _unequal_lengths):
        assert "pads all samples of a call to the longest, in multiples of 32" in said
        assert error < 1e-12
