"""Stages of a sample: peaks of encoders and VAE equal those of real tensors, and which weights are on the device."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.device_profile import CPU
from lightning_cp.mesh.groups import SINGLE_RANK
from lightning_cp.planning import components
from lightning_cp.planning.components import (
    Component,
    ComponentRuns,
    Pipeline,
    compression_of,
    dry_run_component,
    make_pipeline,
    read_components,
    record_call,
)
from lightning_cp.planning.devices import device_named
from lightning_cp.planning.dry_run import dry_run
from lightning_cp.planning.models import MediaSize, diffusers_model, of_dtype
from lightning_cp.planning.request import Request
from lightning_cp.planning.search import search
from lightning_cp.planning.step import Layout
from tests.models.wan import WAN
from tests.pipelines import flux, qwen_image, sd3, wan
from tests.pipelines.tiny import TinyPipe

TINY: dict[str, TinyPipe] = {**flux.TINY, **wan.TINY, **sd3.TINY, **qwen_image.TINY}
_CASES = ["wan", *(pytest.param(x, marks=pytest.mark.full) for x in ("flux", "sd3", "qwen_image"))]
SIZE = MediaSize(32, 48, 9, text=11, batch=2)
H100 = device_named("h100")


def _value(x: Tensor) -> Tensor:
    return torch.randn(x.shape) if x.is_meta else x


def _with_values(component: Component) -> dict[str, Any]:
    return {name: _value(x) if isinstance(x, Tensor) else x for name, x in (component.inputs or {}).items()}


@pytest.mark.parametrize("name", _CASES)
def test_peaks_equal_those_of_real_tensors(name: str, tmp_path: Path) -> None:
    pipe = TINY[name].make()
    pipe.save_pretrained(tmp_path)
    found = make_pipeline(*read_components(tmp_path), SIZE)
    assert not found.uncounted
    assert {"encode", "decode"} == {x.stage for x in found.components}
    assert found.steps == (50 if name in ("wan", "qwen_image") else 28)
    for component in found.components:
        dry = dry_run_component(component, 1, device=CPU, dtype=torch.float32)
        module = pipe.components[component.name].float().eval()
        real = record_call(module, component.method, _with_values(component), SINGLE_RANK)
        assert dry.peak == real.peak, component.name
        assert dry.flops == real.flops > 0
        assert dry.calls == pytest.approx(real.calls, rel=0.01)
        assert component.weight_bytes(torch.float32) == real.peak["weights"]
        pixels = (
            getattr(module, "decode", lambda _: None)(**_with_values(component)) if component.name == "vae" else None
        )
        assert pixels is None or pixels.sample.shape[-2:] == (SIZE.height, SIZE.width)


class _Reads(nn.Module):
    """An encoder that needs the values of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(self.linear.weight.sum())


def _request(pipeline: Pipeline, **others: Any) -> Request:
    model = diffusers_model("WanTransformer3DModel", WAN, MediaSize(32, 48, 9, text=7))
    return Request(model, 1, H100, task="sample", pipeline=pipeline, reserved_gb=0, **others)


def _pipeline(*extra: Component) -> Pipeline:
    pipe = wan.TINY["wan"].make()
    entries = {
        "text_encoder": ("UMT5EncoderModel", pipe.text_encoder.config.to_dict()),
        "vae": ("AutoencoderKLWan", dict(pipe.vae.config)),
        "transformer_2": ("WanTransformer3DModel", dict(pipe.transformer.config)),
    }
    found = make_pipeline("WanPipeline", entries, MediaSize(32, 48, 9, text=7))
    return replace(found, components=(*found.components, *extra))


@pytest.mark.full
def test_weights_stay_on_the_device_as_the_setting_says() -> None:
    pipeline = _pipeline()
    sizes = {x.name: x.weight_bytes(torch.bfloat16) for x in pipeline.components}
    choices = {
        setting: search(_request(pipeline, stages=setting)).choices[0] for setting in ("together", "offload", "release")
    }
    weights = {name: [x.peak["weights"] for x in choice.stages] for name, choice in choices.items()}
    transformer, everything = sizes["transformer_2"], sum(sizes.values()) + sizes["transformer_2"]
    assert weights["together"] == [everything] * 3
    assert weights["offload"] == [sizes["text_encoder"], transformer, sizes["vae"]]
    assert weights["release"] == [sizes["text_encoder"], 2 * transformer, sizes["vae"]]
    for choice in choices.values():
        assert choice.peak_bytes == max(x.peak_bytes for x in choice.stages)
        assert all(x.seconds > 0 for x in choice.stages)


@pytest.mark.full
def test_what_does_not_fit_names_the_stage() -> None:
    request = _request(_pipeline())
    needs = {x.name: x.peak_bytes for x in search(request).choices[0].stages}
    assert max(needs, key=needs.__getitem__) == "decode"
    found = search(replace(request, memory_gb=(needs["decode"] - 1000) / 1e9))
    assert found.excluded[0].stage == "decode"
    assert "needs 1e-06 GB more than" in found.reason
    assert "GB to decode" in found.reason


@pytest.mark.full
def test_a_component_that_cannot_be_traced_counts_with_its_weights() -> None:
    with torch.device("meta"):
        reads = Component("reader", "encode", _Reads(), {"x": torch.empty(1, 8, device="meta")})
    one, two = (search(_request(x)).choices[0] for x in (_pipeline(), _pipeline(reads)))
    assert [x.peak["weights"] for x in two.stages] == [x.peak["weights"] + 2 * 9000 for x in one.stages]
    (problem,) = two.stages[0].problems
    assert problem.startswith("reader (_Reads) cannot be traced (")
    assert problem.endswith("only its weights are counted")


def test_an_error_of_our_own_code_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        component = Component("linear", "encode", nn.Linear(8, 8), {"input": torch.empty(1, 8)})
    assert not isinstance(ComponentRuns(CPU, torch.float32).run(component, ranks=1), str)
    monkeypatch.setattr(components, "links_of", None)
    with pytest.raises(TypeError, match="NoneType"):
        ComponentRuns(CPU, torch.float32).run(component, ranks=1)


def test_a_time_per_token_is_planned() -> None:
    flops = []
    for per_token in (False, True):
        model = diffusers_model("WanTransformer3DModel", WAN, MediaSize(32, 48, 9, text=7), time_per_token=per_token)
        assert model.inputs["timestep"].shape == ((1, model.tokens) if per_token else (1,))
        flops.append(dry_run(model.build, of_dtype(model.inputs, torch.bfloat16), Layout(ring=2)).flops)
    assert flops[1] > flops[0]


@pytest.mark.parametrize("space", [8, 16])
def test_the_transformer_gets_the_latents_that_the_vae_decodes(space: int) -> None:
    size = MediaSize(64, 96, 9, text=7)
    large = {"scale_factor_spatial": 16, "patch_size": 2, "in_channels": 12, "out_channels": 12}  # of Wan 2.2 TI2V
    entries = {"vae": ("AutoencoderKLWan", {"z_dim": 4, "base_dim": 4, **(large if space == 16 else {})})}
    assert compression_of(entries) == (space, 4)
    model = diffusers_model("WanTransformer3DModel", WAN, size, compression=compression_of(entries))
    (vae,) = make_pipeline(None, entries, size).components
    assert vae.inputs is not None
    assert model.inputs["hidden_states"].shape[2:] == vae.inputs["z"].shape[2:] == (3, 64 // space, 96 // space)
    assert model.tokens == 3 * (64 // space // 2) * (96 // space // 2)
    if space == 16:
        with pytest.raises(ValueError, match="height=80 must be a multiple of 32"):
            diffusers_model("WanTransformer3DModel", WAN, replace(size, height=80), compression=(16, 4))


def test_classes_that_are_not_known_are_named(tmp_path: Path) -> None:
    index = {"_class_name": "WanPipeline", "vae": ["own", "MyVae"], "tokenizer": ["transformers", "T5Tokenizer"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for name in ("vae", "tokenizer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    found = make_pipeline(*read_components(tmp_path), SIZE)
    assert found.components == ()
    assert [x.partition(":")[0] for x in found.uncounted] == ["vae (MyVae)"]


def test_the_decode_is_divided_over_the_ranks_of_a_sample() -> None:
    (vae,) = (x for x in _pipeline().components if x.name == "vae")
    larger = replace(vae, inputs={"z": torch.empty(1, *vae.inputs["z"].shape[1:3], 64, 40, device="meta")})  # type: ignore[index]
    runs = ComponentRuns(CPU, torch.float32)
    one, two = (runs.run(larger, ranks=ranks) for ranks in (1, 2))
    assert not isinstance(one, str)
    assert not isinstance(two, str)
    assert two.flops < 0.6 * one.flops
    assert two.peak["activations"] < 0.8 * one.peak["activations"]
    assert sum(two.sent_bytes().values()) > 0


@pytest.mark.full
def test_a_large_vae_is_traced_within_20_seconds() -> None:
    vae = make_pipeline(None, {"vae": ("AutoencoderKLWan", {})}, MediaSize(720, 1280, 81)).components[0]
    started = time.process_time()
    step = dry_run_component(vae, 4, device=H100.profile(), dtype=torch.bfloat16)
    assert time.process_time() - started < 20
    assert step.peak["activations"] > 2 << 30
