"""A quantised base on a GPU: its bytes are those of the CPU, and a LoRA gets the gradients of its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_cp.compat.versions import fsdp_refuses_bytes
from lightning_cp.fabric import ContextParallelFSDPStrategy
from lightning_cp.finetune.load import load_transformer, meta_transformer
from lightning_cp.finetune.quantize import FORMATS, QuantizedLinear, pack, quantize_base, unpack
from lightning_cp.training.modes import without_cudnn_attention
from tests.dist.finetune.test_finetune_lora import loss_of
from tests.dist.finetune.test_quantized_base import adapted
from tests.dist.lightning_ranks import present_rank, whole
from tests.harness import RankFailure, RankPool
from tests.models import TINY
from tests.pretrained import inputs, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
EVERY = pytest.mark.parametrize("weights", FORMATS)


@EVERY
@pytest.mark.parametrize(("rows", "columns"), [(5, 64), (33, 150), (1, 7)])
def test_bytes_and_values_are_those_of_the_cpu(weights: str, rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weight[0, :3] = 0
    packed = pack(weight, weights)
    found = pack(weight.to(DEVICE), weights)
    assert torch.equal(found.cpu(), packed)
    # a GPU divides by a number as it multiplies by its inverse: one more rounding
    expected = unpack(packed, weights, columns)
    torch.testing.assert_close(unpack(found, weights, columns).cpu(), expected, rtol=1e-6, atol=0)


def _requested() -> int:
    """Return the bytes of all tensors on the GPU, before the allocator rounds them."""
    return int(torch.cuda.memory_stats(DEVICE)["requested_bytes.all.current"])


@EVERY
def test_a_layer_holds_its_bytes_and_keeps_no_values_for_backward(weights: str) -> None:
    size = 2048
    x = torch.ones(4, size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    layer = QuantizedLinear(nn.Linear(size, size, bias=False, dtype=torch.bfloat16), weights)
    before = _requested()
    layer.to(DEVICE)
    bytes_of_a_row = {"int8": size + 4, "fp8": size + 4, "nf4": size // 2 + 4 * size // 64}[weights]
    assert _requested() - before == size * bytes_of_a_row
    layer(x)  # allocates the table of NF4, and the workspace of the matrix product
    before = _requested()
    output = layer(x)
    assert output.nbytes <= _requested() - before <= 2 * output.nbytes
    output.sum().backward()
    values = layer.dequantized()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.float(), values.float().sum(0).expand(4, -1), rtol=2e-2, atol=2e-2)


def _on_device(name: str, dtype: torch.dtype) -> dict[str, Any]:
    return {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in inputs(name, dtype).items()}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(x.grad).float() for name, x in model.named_parameters() if x.grad is not None}


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the differences of all gradients, relative to the norm of all."""
    assert found.keys() == expected.keys()
    mine, theirs = (torch.cat([x[name].flatten() for name in expected]) for x in (found, expected))
    return float((mine - theirs).norm() / theirs.norm())


@EVERY
@pytest.mark.parametrize("name", ["wan", "flux"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_gradients_are_those_of_the_dequantised_weights(
    weights: str, name: str, dtype: torch.dtype, limit: float
) -> None:
    """Quantised on the GPU, and moved there: both have the gradients of a model with the values of the layers."""
    moved, quantized, plain = (TINY[name].build().to(dtype).train() for _ in range(3))
    quantize_base(moved, weights)
    quantized.to(DEVICE)
    quantize_base(quantized, weights)
    plain.to(DEVICE)
    changed = 0.0
    for path, layer in quantized.named_modules():
        if isinstance(layer, QuantizedLinear):
            values = layer.dequantized()
            changed = max(changed, float((values - plain.get_submodule(path).weight).abs().max()))
            plain.get_submodule(path).weight.data = values
    assert changed > 0
    losses, gradients = [], []
    for model in (moved, quantized, plain):
        adapted(model.cpu()).to(DEVICE)
        with without_cudnn_attention():
            loss = loss_of(model, _on_device(name, dtype))
            loss.backward()
        losses.append(float(loss))
        gradients.append(_gradients(model))
    assert losses[:2] == pytest.approx([losses[2]] * 2, rel=limit)
    assert _distance(gradients[0], gradients[2]) < limit
    assert _distance(gradients[1], gradients[2]) < limit


def _sharded(rank: int, world: int, folder: Path, weights: str) -> tuple[float, dict[str, Tensor], set[str]]:
    """Loss and gradients with FSDP2, which fills the bytes from the files, and the devices of the bytes."""
    present_rank(rank, world)
    fabric = Fabric(accelerator=DEVICE.type, devices=1, strategy=ContextParallelFSDPStrategy())
    fabric.launch()
    model: Any = meta_transformer(folder, dtype=torch.float32)
    quantize_base(model, weights)
    adapted(model)
    wrapped = fabric.setup(model)
    loss = loss_of(wrapped, _on_device("wan", torch.float32))
    fabric.backward(loss)
    where = {x.packed.device.type for x in model.modules() if isinstance(x, QuantizedLinear)}
    return loss.item(), {name: x.cpu() for name, x in _gradients(model).items()}, where


@EVERY
def test_sharded_bytes_are_filled_from_the_files(run_ranks: RankPool, tmp_path: Path, weights: str) -> None:
    folder = saved(tmp_path, "wan")
    model: Any = load_transformer(folder, dtype=torch.float32)
    quantize_base(model, weights)
    loss = loss_of(adapted(model).to(DEVICE), _on_device("wan", torch.float32))
    loss.backward()
    expected = {name: x.cpu() for name, x in _gradients(model).items()}
    if fsdp_refuses_bytes():
        with pytest.raises(RankFailure, match=r"is quantised .* install torch 2\.12 or later"):
            run_ranks(1, _sharded, folder, weights, init=False)
        return
    ((found, gradients, where),) = run_ranks(1, _sharded, folder, weights, init=False)
    assert where == {DEVICE.type}
    assert found == pytest.approx(loss.item(), rel=1e-5)
    assert _distance(gradients, expected) < 1e-5
