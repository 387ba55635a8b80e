"""Guiders of diffusers that leave parts of a transformer out, modular pipelines, and PAG pipelines."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from diffusers import ClassifierFreeGuidance, LayerSkipConfig, PerturbedAttentionGuidance, SkipLayerGuidance
from diffusers.guiders import AutoGuidance
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_cp import (
    ContextParallelConfig,
    apply_context_parallel,
    parallelize_pipeline,
    remove_context_parallel,
    unparallelize_pipeline,
)
from lightning_cp.errors import InterceptionError, PlanError
from lightning_cp.pipelines import parallel_pipeline
from lightning_cp.plans import Plan, split
from tests import features
from tests.dist.compare import of_first_rank
from tests.harness import RankPool
from tests.models.modes import MODES
from tests.pipelines import PIPES
from tests.pipelines.tiny import error_of

MODULAR = {"qwen_image": "QwenImageModularPipeline", "z_image": "ZImageModularPipeline"}
SCORES = {"skip_attention": False, "skip_attention_scores": True, "skip_ff": False}


def _skip(**parts: Any) -> SkipLayerGuidance:
    always = {"skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0, "skip_layer_guidance_scale": 2.0}
    return SkipLayerGuidance(guidance_scale=3.0, skip_layer_config=LayerSkipConfig([1], **parts), **always)


def _guider(name: str) -> Any:
    always = {"perturbed_guidance_start": 0.0, "perturbed_guidance_stop": 1.0}
    match name:
        case "plain":
            return ClassifierFreeGuidance(guidance_scale=3.0)
        case "attention scores":
            return PerturbedAttentionGuidance(
                3.0, 2.0, perturbed_guidance_config=LayerSkipConfig([1], **SCORES), **always
            )
        case "attention":
            return _skip(skip_ff=False)
        case "feed-forward":
            return _skip(skip_attention=False)
        case "block":
            return _skip()
        case "block of the unconditional":
            return AutoGuidance(3.0, auto_guidance_config=LayerSkipConfig([0, 1]))
    raise KeyError(name)


# By pipeline. With joint attention that takes two streams diffusers cannot skip all of attention.
TRIED = {
    "qwen_image": ("plain", "attention scores", "feed-forward"),
    "hunyuan_image": ("attention scores", "block", "block of the unconditional"),
    "z_image": ("attention scores", "attention"),
}


def _pipe(name: str, guider: Any) -> Any:
    pipe = PIPES[name].pipe()
    if name in MODULAR:
        modular = getattr(diffusers, MODULAR[name])()
        names = set(modular.pretrained_component_names) & {key for key, x in pipe.components.items() if x is not None}
        modular.update_components(guider=guider, **{key: pipe.components[key] for key in names})
        return modular
    pipe.guider = guider
    return pipe


def _output(pipe: Any, name: str) -> Tensor:
    settings: dict[str, Any] = {"prompt": "a cat", "negative_prompt": "dark", "height": 32, "width": 48}
    settings |= {"num_inference_steps": 2} | ({"output": "images"} if name in MODULAR else {})
    result = pipe(**settings, output_type="pt", generator=torch.Generator().manual_seed(7))
    return torch.as_tensor(result if isinstance(result, Tensor) else result[0])


def _tried(rank: int, world: int, name: str, mode: str, cfg: int) -> dict[str, tuple[float, float, int]]:
    """Return by guider: the error, the difference from plain guidance, and the number of distributed calls."""
    found = {}
    plain = of_first_rank(lambda: _output(_pipe(name, _guider("plain")), name))
    for guider in TRIED[name]:
        pipe = _pipe(name, _guider(guider))
        alone = of_first_rank(partial(_output, pipe, name))
        parallelize_pipeline(pipe, MODES[mode](world // cfg), cfg=cfg)
        together = _output(pipe, name)
        installed = parallel_pipeline(pipe)
        assert installed is not None
        unparallelize_pipeline(pipe)
        assert rank < world - 1 or torch.equal(_output(pipe, name), alone), "not as before"
        found[guider] = error_of(alone, together), error_of(alone, plain), installed.branch_runner.shared
    return found


@pytest.mark.parametrize(
    ("name", "world", "mode", "cfg"),
    [("z_image", 2, "ring", 2), ("qwen_image", 3, "ulysses", 1), ("hunyuan_image", 4, "ulysses", 2)],
)
@pytest.mark.default(1)
def test_guiders_give_one_process_images(run_ranks: RankPool, name: str, world: int, mode: str, cfg: int) -> None:
    for found in run_ranks(world, _tried, name, mode, cfg, timeout_s=120):
        for guider, (error, change, shared) in found.items():
            assert error < 1e-4, guider
            features.compared("guiders that skip layers or attention", error)
            assert change > 1e-3 or guider == "plain", f"{guider} changes nothing"
            assert (shared > 0) == (cfg > 1), guider


def _with_shards(rank: int, world: int, name: str, guider: str) -> tuple[float, float]:
    """Return the error with sharded weights, and the difference from plain guidance."""
    pipe = _pipe(name, _guider(guider))
    alone = of_first_rank(lambda: _output(pipe, name))
    plain = of_first_rank(lambda: _output(_pipe(name, _guider("plain")), name))
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world), shard=["transformer"], vae=False)
    found = [_output(pipe, name) for _ in range(2)]
    assert any(isinstance(x, DTensor) for x in pipe.transformer.parameters())
    return max(error_of(alone, x) for x in found), error_of(alone, plain)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "guider"), [("hunyuan_image", "block"), ("qwen_image", "attention scores"), ("z_image", "attention")]
)
def test_guiders_skip_layers_with_sharded_weights(run_ranks: RankPool, name: str, guider: str) -> None:
    for error, change in run_ranks(3, _with_shards, name, guider, timeout_s=240):
        assert error < 1e-4
        assert change > 1e-3, f"{guider} changes nothing"
        features.compared("guiders that skip layers, with sharded weights", error)


class Cross(torch.nn.Module):
    """Attention to other tokens, if there are any."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        return torch.nn.functional.scaled_dot_product_attention(x[None], y[None], y[None])[0]


class Blocks(torch.nn.Module):
    """One block; `other` has 3 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.proj_out = torch.nn.ModuleList([Cross()]), torch.nn.Identity()

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        out: Tensor = self.proj_out(self.blocks[0](x, other))
        return out


def test_skipped_scores_of_unequal_lengths_are_refused_in_parallel_models_only() -> None:
    x, y = torch.randn(2, 5, 4), torch.randn(2, 3, 4)
    model, plain = Blocks(), Cross()
    plan = Plan({"blocks": {"x": split(1, "image")}}, {"proj_out": split(1, "image")})
    expected = plain(x, y)
    apply_context_parallel(model, ContextParallelConfig(), plan)
    assert torch.allclose(model(x), plain(x))
    with AttentionScoreSkipFunctionMode():
        assert torch.equal(model(x), x)
        with pytest.raises(InterceptionError, match="skip_attention_scores=True, but 5 queries attend to 3 keys"):
            model(x, y)
        assert torch.equal(plain(y), y)
        assert torch.equal(plain(x, y), expected)
    remove_context_parallel(model)
    with AttentionScoreSkipFunctionMode():
        assert torch.equal(plain(y), y)


def _dropping(rank: int, world: int) -> str:
    """An error is raised for a guider that is set before, and for one that is set afterwards."""
    drops = AutoGuidance(auto_guidance_config=LayerSkipConfig([1], dropout=0.25))
    pipe = _pipe("hunyuan_image", drops)
    with pytest.raises(PlanError) as before:
        parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
    pipe.guider = _guider("plain")
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
    pipe.guider = drops
    with pytest.raises(PlanError) as after:
        _output(pipe, "hunyuan_image")
    assert str(before.value) == str(after.value)
    return str(before.value)


def test_a_guider_that_drops_at_random_is_refused(run_ranks: RankPool) -> None:
    features.refused("guiders that drop at random")
    for told in run_ranks(2, _dropping):
        assert told.startswith("HunyuanImagePipeline.guider: AutoGuidance has random dropout (dropout=0.25)")


def _refused(rank: int, world: int, name: str, cfg: int) -> tuple[str, str]:
    made = PIPES[name].make()
    kind = getattr(diffusers, type(made).__name__.replace("Pipeline", "PAGPipeline"))
    pipe = kind(**made.components, pag_applied_layers=["0"])
    with pytest.raises(PlanError) as refusal:
        parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world // cfg), cfg=cfg)
    assert type(pipe) is kind, "the pipeline is not as it was"
    assert parallel_pipeline(pipe) is None
    parallelize_pipeline(type(made).from_pipe(pipe), ContextParallelConfig(ring_degree=world // cfg), cfg=cfg)
    return type(made).__name__, str(refusal.value)


@pytest.mark.parametrize(("name", "cfg"), [("pixart_sigma", 1), ("sana", 3)])
@pytest.mark.default(1)
def test_pag_pipelines_are_refused_by_name(run_ranks: RankPool, name: str, cfg: int) -> None:
    features.refused("PAG pipelines")
    for plain, told in run_ranks(3, _refused, name, cfg):
        assert told.startswith(f"{plain.replace('Pipeline', 'PAGPipeline')} replaces attention processors in each call")
        assert f"use {plain}, or" in told
