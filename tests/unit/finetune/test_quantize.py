"""Quantised weights: their values, bytes and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.finetune.quantize import FORMATS, QuantizedLinear, pack, quantize_base, unpack
from lightning_cp.finetune.settings import LoraSettings
from tests.models import TINY
from tests.pretrained import inputs

EVERY = pytest.mark.parametrize("weights", FORMATS)


@EVERY
@pytest.mark.parametrize(("rows", "columns"), [(5, 64), (3, 150), (1, 7)])
def test_values_are_the_nearest_of_their_format(weights: str, rows: int, columns: int) -> None:
    weight = torch.rand(rows, columns).add(0.05) * torch.randn(rows, columns).sign()
    weight *= torch.tensor([10.0**i for i in range(rows)])[:, None]
    weight[0, :3] = 0
    block = FORMATS[weights].block or columns
    found = unpack(pack(weight, weights), weights, columns)
    levels = unpack_levels(weights)
    for start in range(0, columns, block):
        part = weight[:, start : start + block]
        choices = levels * part.abs().amax(1, keepdim=True)[..., None]
        nearest = (part[..., None] - choices).abs().argmin(-1, keepdim=True)
        expected = choices.expand(*part.shape, -1).gather(-1, nearest)[..., 0]
        torch.testing.assert_close(found[:, start : start + block], expected, rtol=1e-6, atol=0)


def unpack_levels(weights: str) -> torch.Tensor:
    """All values of a format, from its definition."""
    if weights == "int8":
        return torch.arange(-127, 128) / 127
    if weights == "fp8":
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        return every[every.isfinite()].unique() / 448
    # The table in the appendix of arXiv:2305.14314, rounded
    lower = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911]
    upper = [0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
    found = unpack(pack(torch.tensor([[*lower, *upper]]), "nf4"), "nf4", 16)[0]
    torch.testing.assert_close(found, torch.tensor([*lower, *upper]), rtol=0, atol=1e-4)
    return found


@EVERY
def test_rows_are_quantised_on_their_own_and_take_few_bytes(weights: str) -> None:
    weight = torch.randn(9, 512)
    packed = pack(weight, weights)
    assert torch.equal(packed[2:5], pack(weight[2:5], weights))
    assert packed.dtype == torch.uint8
    assert packed.shape == (9, {"int8": 516, "fp8": 516, "nf4": 256 + 4 * 8}[weights])
    assert not unpack(pack(torch.zeros(2, 70), weights), weights, 70).any()


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixed", [False, True])
def test_a_layer_computes_with_the_values_and_their_gradient(weights: str, dtype: torch.dtype, mixed: bool) -> None:
    layer = nn.Linear(70, 6).to(dtype)
    quantized = QuantizedLinear(layer, weights)
    layer.weight.data = quantized.dequantized()
    x = torch.randn(2, 5, 70, dtype=dtype)
    results = []
    for one in (layer, quantized):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            output = one(given)
        output.float().square().sum().backward()
        results.append((output, given.grad))
    assert results[0][0].dtype == results[1][0].dtype
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_backward_keeps_no_values() -> None:
    quantized = QuantizedLinear(nn.Linear(256, 300), "nf4")
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        quantized(torch.randn(2, 256, requires_grad=True))
    assert [(x.dtype, tuple(x.shape)) for x in kept if x.dtype == torch.uint8] == [(torch.uint8, (300, 128 + 16))]
    assert sum(x.numel() for x in kept if x.dtype != torch.uint8) == 512, "the table of NF4, of all layers"


@EVERY
@pytest.mark.parametrize("name", ["wan", "flux"])
@pytest.mark.default("wan-int8", "flux-fp8")
def test_a_model_is_that_of_the_dequantised_weights(weights: str, name: str) -> None:
    model, plain = TINY[name].build().float(), TINY[name].build().float()
    base = plain(**inputs(name), return_dict=False)[0]
    quantize_base(model, weights)
    layers = {path: x for path, x in model.named_modules() if isinstance(x, QuantizedLinear)}
    assert layers.keys() == {path for path, x in plain.named_modules() if type(x) is nn.Linear and "blocks." in path}
    for path, layer in layers.items():
        plain.get_submodule(path).weight.data = layer.dequantized()
        assert layer.weight.shape == layer.dequantized().shape
        assert layer.weight.isnan().all()
    found, expected = (x(**inputs(name), return_dict=False)[0] for x in (model, plain))
    assert torch.equal(found, expected)
    assert not torch.equal(found, base)
    assert add_lora(model, LoraSettings(rank=2)) == add_lora(plain, LoraSettings(rank=2))
    assert torch.equal(model(**inputs(name), return_dict=False)[0], expected)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo itself
@EVERY
def test_a_compiled_layer_computes_the_same(weights: str) -> None:
    layer = QuantizedLinear(nn.Linear(70, 6), weights)
    x, results = torch.randn(3, 70), []
    for one in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        given = x.clone().requires_grad_()
        output = one(given)
        output.square().sum().backward()
        results.append((output, given.grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_blocks_are_found_whatever_the_name_of_their_list() -> None:
    model = TINY["z_image"].build()
    quantize_base(model, "nf4")
    lists = {path.split(".")[0] for path, x in model.named_modules() if isinstance(x, QuantizedLinear)}
    assert lists == {"noise_refiner", "context_refiner", "layers"}


def test_what_cannot_be_quantised_is_refused() -> None:
    model: Any = TINY["wan"].build()
    with pytest.raises(ValueError, match="weights='int2' must be one of int8, fp8, nf4"):
        quantize_base(model, "int2")
    with pytest.raises(ValueError, match="Linear has no blocks with linear layers to quantise"):
        quantize_base(nn.Linear(2, 2))
    add_lora(model, LoraSettings(rank=2))
    with pytest.raises(ValueError, match="WanTransformer3DModel has adapters: quantise it before add_lora"):
        quantize_base(model)
