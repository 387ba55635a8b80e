"""Step caches on a model of one rank: supported caches, errors for others, and reset of their state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TextKVCacheConfig
from diffusers.hooks import apply_first_block_cache
from diffusers.hooks.first_block_cache import FBCHeadBlockHook, FBCSharedBlockState
from diffusers.hooks.hooks import HookRegistry, StateManager

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.engine.apply import installed_on
from lightning_cp.engine.caches import StepCaches
from lightning_cp.engine.caches.watched import ratio
from lightning_cp.errors import PlanError, ShapeError
from tests.dist.step_caches import Clock, loop
from tests.models import TINY

CONFIG = FirstBlockCacheConfig(threshold=0.05)


def _caches(model: Any) -> StepCaches:
    installed = installed_on(model)
    assert installed is not None
    return installed.caches


def test_a_cache_without_enable_cache_is_followed() -> None:
    model, arguments = TINY["wan"].build(), TINY["wan"].arguments()
    apply_first_block_cache(model, CONFIG)
    apply_context_parallel(model, ContextParallelConfig())
    assert any(loop(model, arguments, Clock()).skips)
    assert [kind.name for kind in _caches(model).kinds] == ["FirstBlockCache"]
    remove_context_parallel(model)
    assert any(loop(model, arguments, Clock()).skips), "the cache itself stays"
    hook = model.blocks[0]._diffusers_hook.hooks["fbc_leader_block_hook"]
    assert "_should_compute_remaining_blocks" not in vars(hook)
    assert type(hook.fn_ref).__name__ == "HookFunctionReference"


def test_a_disabled_cache_is_forgotten() -> None:
    model, arguments = TINY["wan"].build(), TINY["wan"].arguments()
    apply_context_parallel(model, ContextParallelConfig())
    model.enable_cache(CONFIG)
    loop(model, arguments, Clock(), steps=(0,))
    assert _caches(model)
    model.disable_cache()
    loop(model, arguments, Clock(), steps=(0,))
    assert not _caches(model)


class _UsersCache(FBCHeadBlockHook):
    pass


def test_a_users_own_cache_is_refused() -> None:
    model, arguments = TINY["wan"].build(), TINY["wan"].arguments()
    apply_context_parallel(model, ContextParallelConfig())
    hook = _UsersCache(StateManager(FBCSharedBlockState), 0.1)
    HookRegistry.check_if_exists_or_initialize(model.blocks[0]).register_hook(hook, "mine")
    for _ in range(2):
        with pytest.raises(PlanError, match="_UsersCache is derived from a step cache of diffusers"):
            loop(model, arguments, Clock(), steps=(0,))
    model.blocks[0]._diffusers_hook.remove_hook("mine")
    loop(model, arguments, Clock(), steps=(0,))


def test_a_deep_copy_of_a_cached_model_is_refused() -> None:
    model, arguments = TINY["wan"].build(), TINY["wan"].arguments()
    apply_context_parallel(model, ContextParallelConfig())
    model.enable_cache(CONFIG)
    loop(model, arguments, Clock(), steps=(0,))
    copied = copy.deepcopy(model)
    with pytest.raises(PlanError, match="deep copy of a model with a step cache"):
        loop(copied, arguments, Clock(), steps=(0,))
    loop(model, arguments, Clock(), steps=(0, 1))


@pytest.mark.parametrize("before", [True, False])
def test_cache_dit_is_refused_by_name(*, before: bool) -> None:
    """The attribute is that of cache-dit 1.5.3."""
    model, arguments = TINY["wan"].build(), TINY["wan"].arguments()
    if before:
        model._is_cached = True
        with pytest.raises(PlanError, match="cache-dit is enabled on WanTransformer3DModel"):
            apply_context_parallel(model, ContextParallelConfig())
        assert installed_on(model) is None
        return
    apply_context_parallel(model, ContextParallelConfig())
    loop(model, arguments, Clock(), steps=(0,))
    model._is_cached = True
    with pytest.raises(PlanError, match=r"transformer\.enable_cache"):
        loop(model, arguments, Clock(), steps=(0,))


def test_a_residual_that_does_not_fit_is_an_error_and_not_a_warning() -> None:
    model, arguments = TINY["wan"].build(), TINY["wan"].arguments()
    apply_context_parallel(model, ContextParallelConfig())
    model.enable_cache(MagCacheConfig(num_inference_steps=8, mag_ratios=[1.0] * 8, retention_ratio=0.0))
    loop(model, arguments, Clock(), steps=(0,))
    (state,) = model.blocks[0]._diffusers_hook.hooks["mag_cache_leader_block_hook"].state_manager._state_cache.values()
    state.previous_residual = torch.zeros(2, 50, 48, dtype=torch.float64)
    with pytest.raises(
        ShapeError, match=r"MagCache cannot add its residual, of shape \(2, 50, 48\), to .* \(2, 45, 48\)"
    ):
        loop(model, arguments, Clock(), steps=(1,))


def test_texts_are_recognised_by_content_and_not_by_address() -> None:
    tiny = TINY["nucleus_moe"]
    arguments = {**tiny.arguments(), "encoder_hidden_states_mask": None}
    expected = []
    text = arguments["encoder_hidden_states"]
    texts = [text, text[:, :5], text * 0.3, text]
    model = tiny.build()
    expected = [_output(model, arguments, x) for x in texts]
    apply_context_parallel(model, ContextParallelConfig())
    model.enable_cache(TextKVCacheConfig())
    _output(model, arguments, text)  # the cache is found
    _caches(model).reset()
    buffer = text.clone()
    for i, (x, out) in enumerate(zip(texts, expected, strict=True)):
        given = buffer[:, : x.shape[1]].copy_(x)  # the same address each time
        assert torch.equal(_output(model, arguments, given), out), f"text {i}"
    keys = model.transformer_blocks[0]._diffusers_hook.hooks["text_kv_cache_block"].block_state_manager._state_cache
    assert len(keys["inference"].kv_cache) == 3


def _output(model: Any, arguments: dict[str, Any], text: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(**{**arguments, "encoder_hidden_states": text}, return_dict=False)[0]
        return out


def test_ratios_are_those_of_tensors() -> None:
    assert ratio(1.0, 0.0) == float("inf")
    assert ratio(0.0, 0.0) != ratio(0.0, 0.0)
    assert ratio(1.0, 4.0) == 0.25
