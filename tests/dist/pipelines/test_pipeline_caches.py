"""diffusers' step caches in parallel pipelines: CFG on ranks, prompts over data groups, two calls in a row."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
)
from torch import Tensor, nn

from lightning_cp import parallelize_pipeline, unparallelize_pipeline
from lightning_cp.errors import GuidanceError, PeerMismatchError, PlanError
from lightning_cp.pipelines import sample_prompts
from tests import features
from tests.dist.compare import of_first_rank
from tests.harness import RankPool
from tests.models.modes import MODES
from tests.pipelines import PIPES
from tests.pipelines.tiny import error_of

WAYS = {
    "ring3": ("ring", 3, 1),
    "cfg2": ("ring", 1, 2),
    "cfg2_ring2": ("ring", 2, 2),
    "cfg2_ulysses2": ("ulysses", 2, 2),
}
STEPS = 6
THRESHOLDS = {"CogVideoXPipeline": 0.25, "FluxPipeline": 0.5}  # with which some steps are skipped


def _config(cache: str, pipe: Any) -> Any:
    at = {"current_timestep_callback": lambda: pipe.current_timestep}
    return {
        "first_block": lambda: FirstBlockCacheConfig(threshold=THRESHOLDS.get(type(pipe).__name__, 0.12)),
        "mag": lambda: MagCacheConfig(num_inference_steps=STEPS, mag_ratios=[1.0, 1.02] * 3, retention_ratio=0.2),
        "taylorseer": lambda: TaylorSeerCacheConfig(
            cache_interval=2,
            disable_cache_before_step=1,
            cache_identifiers=[r".*blocks\.\d\.attn1?"],
            taylor_factors_dtype=torch.float32,
        ),
        "sea": lambda: SeaCacheConfig(threshold=0.5),
        "broadcast": lambda: PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 1001), **at
        ),
        "faster": lambda: FasterCacheConfig(tensor_format="BFCHW", attention_weight_callback=lambda _: 0.5, **at),
    }[cache]()


def _pipe(name: str) -> Any:
    return PIPES[name].pipe()


def _transformers(name: str, pipe: Any) -> list[Any]:
    return [pipe.components[x] for x in PIPES[name].transformers]


def _sample(pipe: Any, name: str, seed: int = 7, **others: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of FasterCache's torch.meshgrid
        return PIPES[name].draw(pipe, seed, **{"num_inference_steps": STEPS, **others})


def _count(pipe: Any, name: str) -> list[int]:
    """Counts the calls of the last block's own layers."""
    counts = [0]
    for transformer in _transformers(name, pipe):
        blocks = [m for _, m in transformer.named_children() if isinstance(m, nn.ModuleList)][-1]
        inner = next(m for m in blocks[-1].modules() if isinstance(m, nn.Linear))
        inner.register_forward_hook(lambda *_: counts.__setitem__(0, counts[0] + 1))
    return counts


def _tried(rank: int, world: int, name: str, cache: str, ways: list[str]) -> list[tuple[float, float, int, int]]:
    """In each way, for two calls in a row: the error, the cache's effect, blocks run here and in one process."""
    pipe = _pipe(name)
    exact = of_first_rank(lambda: _sample(pipe, name))
    for transformer in _transformers(name, pipe):
        transformer.enable_cache(_config(cache, pipe))
    counts = _count(pipe, name)
    alone = _sample(pipe, name)
    expected = counts[0]
    change = error_of(exact, alone)
    found = []
    for i, way in enumerate(ways):
        mode, ranks, cfg = WAYS[way]
        pipe = _pipe(name)
        counts = _count(pipe, name)
        for step in ("parallelize", "enable") if i % 2 else ("enable", "parallelize"):
            if step == "parallelize":
                parallelize_pipeline(pipe, MODES[mode](ranks), cfg=cfg)
                continue
            for transformer in _transformers(name, pipe):
                transformer.enable_cache(_config(cache, pipe))
        for _ in range(2):
            counts[0] = 0
            error = error_of(alone, _sample(pipe, name, seed=7 + rank))
            found.append((error, change, counts[0], expected))
        unparallelize_pipeline(pipe)
    return found


_TRIALS = [
    ("cogvideox", "first_block", 4, ["cfg2_ring2", "cfg2_ulysses2"]),
    ("wan", "first_block", 4, ["cfg2_ring2"]),
    ("flux", "first_block", 3, ["ring3"]),
    ("flux_true_cfg", "taylorseer", 2, ["cfg2", "cfg2"]),
    ("flux_true_cfg", "mag", 2, ["cfg2"]),
    ("cogvideox", "broadcast", 2, ["cfg2"]),
    ("wan", "sea", 4, ["cfg2_ring2"]),
    ("wan_two_experts", "first_block", 2, ["cfg2"]),
    ("cogvideox", "faster", 3, ["ring3"]),
]


@pytest.mark.parametrize(("name", "cache", "world", "ways"), _TRIALS)
@pytest.mark.default("wan-first_block")
def test_latents_are_those_of_one_process_with_the_cache(
    run_ranks: RankPool, name: str, cache: str, world: int, ways: list[str]
) -> None:
    by_rank = run_ranks(world, _tried, name, cache, ways, timeout_s=300)
    for found in by_rank:
        for error, change, _, _ in found:
            assert error < 1e-4
            assert change > 100 * error, "the cache changes nothing"
            features.compared("step caches", error)
    for call in zip(*by_rank, strict=True):
        ran, expected = [count for _, _, count, _ in call], call[0][3]
        if name in ("cogvideox", "flux"):  # one call a step, for all branches
            assert ran == [expected] * world
        else:  # a branch for each half of the ranks; all compute the first call of each shape
            assert sum(ran) >= expected > max(ran), (ran, expected)


def _failed(rank: int, world: int) -> float:
    """The error of a call after one that failed in a callback, at its third step."""
    pipe = _pipe("flux")
    pipe.transformer.enable_cache(_config("first_block", pipe))
    alone = of_first_rank(partial(_sample, pipe, "flux"))
    pipe = _pipe("flux")
    parallelize_pipeline(pipe, MODES["ring"](world))
    pipe.transformer.enable_cache(_config("first_block", pipe))

    def stop(pipe: Any, step: int, *_: Any) -> Any:
        if step == 2:
            raise RuntimeError("step 2")
        return {}

    with pytest.raises(RuntimeError, match="step 2"):
        _sample(pipe, "flux", callback_on_step_end=stop)
    return error_of(alone, _sample(pipe, "flux"))


@pytest.mark.full
def test_a_call_after_a_failed_one_starts_with_an_empty_cache(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _failed, timeout_s=120)) < 1e-4


def _prompts(rank: int, world: int) -> list[float]:
    """Errors of three prompts over two data groups, by sample."""
    prompts, others = ["a cat", "two dogs run", "a red car"], {"num_inference_steps": STEPS}
    tiny = PIPES["flux"]
    others |= {name: value for name, value in tiny.inputs().items() if name in ("height", "width", "output_type")}
    pipe = _pipe("flux")
    pipe.transformer.enable_cache(_config("first_block", pipe))
    alone = [
        pipe(prompt, generator=torch.Generator().manual_seed(i), **others).images for i, prompt in enumerate(prompts)
    ]
    pipe = _pipe("flux")
    parallelize_pipeline(pipe, MODES["ring"](2))
    pipe.transformer.enable_cache(_config("first_block", pipe))
    together = sample_prompts(pipe, prompts, seed=0, **others)
    return [error_of(y[0], torch.as_tensor(x)) for x, y in zip(together, alone, strict=True)]


@pytest.mark.full
def test_data_groups_decide_for_their_own_prompts(run_ranks: RankPool) -> None:
    for errors in run_ranks(4, _prompts, timeout_s=240):
        assert max(errors) < 1e-4


def _refusals(rank: int, world: int) -> list[str]:
    said = []
    for name, cache in (("flux_true_cfg", "broadcast"), ("cogvideox", "faster")):
        pipe = _pipe(name)
        parallelize_pipeline(pipe, MODES["ring"](1), cfg=2)
        pipe.transformer.enable_cache(_config(cache, pipe))
        with pytest.raises(GuidanceError) as refusal:
            _sample(pipe, name)
        said.append(str(refusal.value))
    pipe = _pipe("wan")
    pipe.transformer.enable_cache(_config("sea", pipe))
    with pytest.raises(PlanError) as sharded:
        parallelize_pipeline(pipe, MODES["ring"](2), shard=["transformer"])
    return [*said, str(sharded.value)]


def test_caches_that_cannot_be_exact_are_refused_by_name(run_ranks: RankPool) -> None:
    features.refused("step caches that share one state between branches, with `cfg=2`; SeaCache with sharded weights")
    for broadcast, faster, sea in run_ranks(2, _refusals, timeout_s=120):
        assert "PyramidAttentionBroadcast keeps one state for all branches" in broadcast
        assert "FasterCache computes the unconditional branch from the conditional one, but cfg=2" in faster
        assert "SeaCache on WanPipeline.transformer computes every step if weights are sharded" in sea


def _unlike(rank: int, world: int) -> tuple[list[str], float]:
    """What is said where rank 1 has another cache, other settings or other modules; then the error with equal ones."""
    pipe, said = _pipe("flux"), []
    pipe.transformer.enable_cache(_config("first_block", pipe))
    alone = _sample(pipe, "flux")
    pipe = _pipe("flux")
    parallelize_pipeline(pipe, MODES["ring"](world))
    attention = {"cache_interval": 2, "disable_cache_before_step": 1}
    for own, others in (
        (None, FirstBlockCacheConfig(threshold=0.5)),
        (FirstBlockCacheConfig(threshold=0.5), FirstBlockCacheConfig(threshold=0.4)),
        (
            TaylorSeerCacheConfig(cache_identifiers=[r"transformer_blocks\.0\.attn"], **attention),
            TaylorSeerCacheConfig(cache_identifiers=[r"transformer_blocks\.1\.attn"], **attention),
        ),
    ):
        config = own if rank == 1 else others
        if config is not None:
            pipe.transformer.enable_cache(config)
        with pytest.raises(PeerMismatchError) as caught:
            _sample(pipe, "flux")
        said.append(str(caught.value))
        if config is not None:
            pipe.transformer.disable_cache()
    pipe.transformer.enable_cache(_config("first_block", pipe))
    return said, error_of(alone, _sample(pipe, "flux"))


def test_ranks_with_other_settings_of_a_cache_are_refused_on_all_ranks(run_ranks: RankPool) -> None:
    for (one, threshold, modules), error in run_ranks(3, _unlike, timeout_s=120):
        assert "step caches of transformer['FBCHeadBlockHook(threshold=0.5)'] was given to one of them only" in one
        assert (
            "step caches of transformer['FBCHeadBlockHook(threshold=0.4)'] was given to one of them only" in threshold
        )
        assert "step caches of transformer['TaylorSeerCacheHook(cache_interval=2" in modules
        assert "1 modules" in modules
        assert error < 1e-4


def _sharded(rank: int, world: int) -> float:
    pipe = _pipe("flux")
    pipe.transformer.enable_cache(_config("first_block", pipe))
    alone = of_first_rank(partial(_sample, pipe, "flux"))
    pipe = _pipe("flux")
    pipe.transformer.enable_cache(_config("first_block", pipe))
    parallelize_pipeline(pipe, MODES["ring"](world), shard=["transformer"])
    return error_of(alone, _sample(pipe, "flux"))


@pytest.mark.full
def test_a_cache_with_sharded_weights(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _sharded, timeout_s=240)) < 1e-4
