"""diffusers' features for weights and layers of a pipeline on several ranks: they work, or raise an error."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate
import pytest
import torch
from diffusers import FluxTransformer2DModel, QuantoConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_cp import parallelize_pipeline, unparallelize_pipeline
from lightning_cp.errors import PlanError
from tests import features
from tests.dist.compare import of_first_rank
from tests.harness import RankPool
from tests.harness.cases import and_others, grouped
from tests.models.modes import MODES
from tests.pipelines import PIPES
from tests.pipelines.tiny import error_of

CPU = torch.device("cpu")
BEFORE, AFTER = "before", "after"  # parallelize_pipeline
WAYS = {"ring2": ("ring", 2, 1), "cfg2": ("ring", 1, 2)}
NAME = "flux_true_cfg"


def _groups(pipe: Any, kind: str) -> None:
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    pipe.transformer.enable_group_offload(onload_device=CPU, offload_device=CPU, offload_type=kind, **blocks)


def _sequential(pipe: Any) -> None:
    """Do enable_sequential_cpu_offload(device="cpu"): accelerate does not take its "cpu:0" for the host."""
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            accelerate.cpu_offload(module, CPU, offload_buffers=bool(module._parameters))


def _quantise(pipe: Any) -> None:
    from optimum.quanto import freeze, qint8, quantize

    quantize(pipe.transformer, weights=qint8)
    freeze(pipe.transformer)


def _load_quantised(pipe: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' next release needs another library
        _reload(pipe, quantization_config=QuantoConfig(weights_dtype="int8"), dtype=torch.float32)


def _reload(pipe: Any, **settings: Any) -> None:
    """The transformer saved, and loaded again with `settings`."""
    with tempfile.TemporaryDirectory() as folder:
        pipe.transformer.save_pretrained(folder)
        pipe.transformer = FluxTransformer2DModel.from_pretrained(folder, **settings)


def _lora(pipe: Any, name: str = "tiny", seed: int = 1) -> None:
    """An adapter for attention and feed-forward."""
    targets = ("attn.to_q", "attn.to_v", "attn.to_out.0", "ff.net.2")
    made, draw = {}, torch.Generator().manual_seed(seed)
    for path, module in pipe.transformer.named_modules():
        if isinstance(module, torch.nn.Linear) and path.removesuffix(".base_layer").endswith(targets):
            path = path.removesuffix(".base_layer")
            made[f"transformer.{path}.lora_A.weight"] = torch.randn(4, module.in_features, generator=draw)
            made[f"transformer.{path}.lora_B.weight"] = torch.randn(module.out_features, 4, generator=draw) / 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of peft: there is an adapter already
        pipe.load_lora_weights(made, adapter_name=name)


def _two_loras(pipe: Any) -> None:
    _lora(pipe, "one", 1)
    _lora(pipe, "two", 2)
    pipe.set_adapters(["one", "two"], [0.7, 0.4])


def _fused(pipe: Any) -> None:
    _lora(pipe)
    pipe.fuse_lora(lora_scale=0.5)
    pipe.unload_lora_weights()


def _compiled(pipe: Any) -> None:
    pipe.transformer.compile_repeated_blocks(backend="aot_eager", fullgraph=True)


def _compiled_copy(pipe: Any) -> None:
    pipe.transformer = torch.compile(pipe.transformer, backend="aot_eager")


WORKS: dict[str, Callable[[Any], None]] = {
    "model offload": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    "sequential offload": _sequential,
    "block offload": lambda pipe: _groups(pipe, "block_level"),
    "leaf offload": lambda pipe: _groups(pipe, "leaf_level"),
    "offload of all components": lambda pipe: pipe.enable_group_offload(CPU, offload_type="leaf_level"),
    "layerwise casting": lambda pipe: pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
    "int8 by quanto": _quantise,
    "int8 by diffusers": _load_quantised,
    "device_map of one": lambda pipe: _reload(pipe, device_map="cpu"),
    "lora": _lora,
    "two loras": _two_loras,
    "fused lora": _fused,
    "attention backend": lambda pipe: pipe.transformer.set_attention_backend("native"),
    "compiled blocks": _compiled,
    "compiled as a whole": lambda pipe: pipe.transformer.compile(backend="aot_eager"),
    "torch.compile": _compiled_copy,
}


def _pipe() -> Any:
    return PIPES[NAME].pipe()


def _output(pipe: Any, **others: Any) -> Tensor:
    return PIPES[NAME].draw(pipe, **others)


def _tried(
    rank: int, world: int, feature: str, when: str, ways: list[str], others: dict[str, Any]
) -> list[tuple[float, float]]:
    """In each way: the error, and how much the feature changes."""
    plain = of_first_rank(lambda: _output(_pipe()))
    pipe = _pipe()
    WORKS[feature](pipe)
    alone = of_first_rank(partial(_output, pipe, **others))
    found = []
    for way in ways:
        mode, ranks, cfg = WAYS[way]
        pipe = _pipe()
        if when == BEFORE:
            WORKS[feature](pipe)
        parallelize_pipeline(pipe, MODES[mode](ranks), cfg=cfg)
        if when == AFTER:
            WORKS[feature](pipe)
        together = [_output(pipe, **others) for _ in range(2)][-1]
        found.append((error_of(alone, together), error_of(plain, alone)))
        unparallelize_pipeline(pipe)
        assert error_of(alone, _output(pipe, **others)) <= 1e-5, "not as before"
    return found


# another transformer, or other modules: refused afterwards
LOADED = ("int8 by quanto", "int8 by diffusers", "device_map of one", "torch.compile")
TRIED = [(feature, AFTER if i % 2 == 0 and feature not in LOADED else BEFORE) for i, feature in enumerate(WORKS)]
TRIED += [("lora", BEFORE), ("two loras", AFTER), ("compiled blocks", BEFORE)]


GROUPS = {"one": TRIED[:1]}
GROUPS |= grouped(dict.fromkeys(TRIED[1:]), lambda x: (re.findall("offload|int8|lora", x[0]) or ["others"])[0])


@pytest.mark.parametrize("tried", GROUPS.values(), ids=GROUPS)
@pytest.mark.default("one")
def test_features_give_one_process_latents(run_ranks: RankPool, tried: list[tuple[str, str]]) -> None:
    for feature, when in tried:
        others = {"joint_attention_kwargs": {"scale": 0.5}} if feature == "lora" else {}
        for found in run_ranks(2, _tried, feature, when, list(WAYS), others, timeout_s=240):
            for error, change in found:
                assert error <= 1e-4, (feature, when)
                assert change > 1e-3 or "lora" not in feature, "the adapters do nothing"


def _tried_with_shards(rank: int, world: int, feature: str, when: str, others: dict[str, Any]) -> tuple[float, bool]:
    """The error, and whether the weights of blocks are still spread after the call."""
    pipe = _pipe()
    WORKS[feature](pipe)
    alone = of_first_rank(partial(_output, pipe, **others))
    pipe = _pipe()
    if when == BEFORE:
        WORKS[feature](pipe)
    parallelize_pipeline(pipe, MODES["ring"](world), shard=["transformer"])
    if when == AFTER:
        WORKS[feature](pipe)
    together = _output(pipe, **others)
    weights = [x for key, x in pipe.transformer.transformer_blocks.named_parameters() if "lora_" not in key]
    return error_of(alone, together), all(isinstance(x, DTensor) for x in weights)


@pytest.mark.full
def test_features_with_sharded_weights(run_ranks: RankPool) -> None:
    tried = [("lora", BEFORE), ("two loras", AFTER), ("attention backend", AFTER), ("compiled blocks", BEFORE)]
    for feature, when in tried:
        others = {"joint_attention_kwargs": {"scale": 0.5}} if feature == "lora" else {}
        for error, spread in run_ranks(2, _tried_with_shards, feature, when, others, timeout_s=240):
            assert error <= 1e-4, feature
            assert spread, feature


def _changes_shards(rank: int, world: int) -> str:
    pipe = _pipe()
    parallelize_pipeline(pipe, MODES["ring"](world), shard=["transformer"])
    with pytest.raises(PlanError) as refusal:
        _compiled(pipe)
    return str(refusal.value)


@pytest.mark.full
def test_sharded_weights_are_compiled_before_only(run_ranks: RankPool) -> None:
    features.refused("compiling blocks of a transformer with sharded weights")
    for said in run_ranks(2, _changes_shards, timeout_s=240):
        assert "are sharded (shard='transformer'): call it before parallelize_pipeline" in said


def _gathers(rank: int, world: int) -> tuple[int, int, int]:
    """Return the number of forwards, of waits of all later gathers for what was computed before, and of gathers."""
    pipe = _pipe()
    parallelize_pipeline(pipe, MODES["ring"](world), shard=["transformer"])
    _output(pipe)
    forwards: list[int] = []
    pipe.transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _output(pipe)
    names = [event.name for event in profile.events()]
    gathers = sum(name.startswith("FSDP::all_gather (") or name == "FSDP::all_gather" for name in names)
    return len(forwards), names.count("FSDP::root_pre_forward"), gathers


@pytest.mark.full
def test_only_the_first_layer_is_gathered_after_what_was_computed_before(run_ranks: RankPool) -> None:
    for forwards, waits, gathers in run_ranks(3, _gathers):
        assert waits == forwards == 4
        assert gathers == 4 * forwards, "of 2 + 2 layers"


def _map(thing: Any) -> None:
    thing.hf_device_map = {"text_encoder": "cuda:0", "transformer": "cuda:1"}


CAST: Callable[[Any], None] = WORKS["layerwise casting"]
# name: feature, settings of parallelize_pipeline, message
REFUSED: dict[str, tuple[Callable[[Any], None], dict[str, Any], tuple[str, ...]]] = {
    "device_map of two for the pipeline": (_map, {}, ("device_map puts FluxPipeline.", "cuda:0", "without device_map")),
    "leaf offload and stages": (
        WORKS["leaf offload"],
        {"stages": "offload"},
        ("group offloading", "FluxPipeline.transformer", "stages='offload'"),
    ),
    "device_map of two for the transformer": (
        lambda pipe: _map(pipe.transformer),
        {},
        ("device_map puts FluxPipeline.transformer", "cuda:1"),
    ),
    "model offload and stages": (
        WORKS["model offload"],
        {"stages": "offload"},
        ("accelerate", "stages='offload'", "pipe.remove_all_hooks()"),
    ),
    "sequential offload and stages": (_sequential, {"stages": "release"}, ("accelerate", "stages='release'")),
    "model offload and shards": (WORKS["model offload"], {"shard": ["transformer"]}, ("accelerate", "shard")),
    "block offload and shards": (WORKS["block offload"], {"shard": ["transformer"]}, ("group offloading", "shard")),
    "layerwise casting and shards": (CAST, {"shard": ["transformer"]}, ("shard='transformer'", "layerwise casting")),
    "int8 and shards": (_quantise, {"shard": ["transformer"]}, ("shard='transformer'", "quantised weights")),
}
ONLY_BEFORE = ("device_map", "int8 and shards", "block offload and shards", "model offload and shards")


def _refusals(rank: int, world: int, name: str) -> tuple[str, str]:
    """The messages if the feature was there before, and if it is enabled afterwards."""
    enable, settings, _ = REFUSED[name]
    pipe = _pipe()
    enable(pipe)
    with pytest.raises(PlanError) as before:
        parallelize_pipeline(pipe, MODES["ring"](world), **settings)
    assert "__call__" not in vars(type(pipe.transformer)), "the pipeline is not as it was"
    if name.startswith(ONLY_BEFORE):
        return str(before.value), ""
    pipe = _pipe()
    parallelize_pipeline(pipe, MODES["ring"](world), **settings)
    enable(pipe)
    with pytest.raises(PlanError) as after:
        _output(pipe)
    return str(before.value), str(after.value)


@pytest.mark.parametrize("names", and_others(REFUSED, 2))
@pytest.mark.default(2)
def test_what_cannot_be_used_is_refused_by_name(run_ranks: RankPool, names: list[str]) -> None:
    for name in names:
        _, _, parts = REFUSED[name]
        for before, after in run_ranks(2, _refusals, name, timeout_s=240):
            for part in parts:
                assert part in before, name
                assert not after or part in after, name
