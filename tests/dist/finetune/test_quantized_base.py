"""A quantised base, whole or sharded: gradients of a LoRA are those of the dequantised weights, in few bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.finetune.host_weights import offload_blocks
from lightning_cp.finetune.load import load_transformer, meta_transformer
from lightning_cp.finetune.quantize import QuantizedLinear, quantize_base
from lightning_cp.finetune.settings import LoraSettings
from tests.dist.finetune.test_finetune_lora import loss_of
from tests.dist.lightning_ranks import fabric_of, whole
from tests.harness import RankPool
from tests.pretrained import inputs, saved

pytestmark = pytest.mark.filterwarnings("ignore")
CP, FSDP = ContextParallelStrategy, ContextParallelFSDPStrategy


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: saved(tmp_path_factory.mktemp(name), name) for name in ("wan", "flux")}


def adapted(model: nn.Module) -> nn.Module:
    """Add a LoRA with values in all matrices."""
    add_lora(model, LoraSettings(rank=3))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.add_(torch.randn(x.shape, generator=generator) * 0.1)
    return model


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(x.grad) for name, x in model.named_parameters() if x.grad is not None}


def _bytes(model: nn.Module) -> int:
    """Return the bytes that this rank holds of the weights of linear layers in blocks, without adapters and biases."""
    held = 0
    for name, x in model.named_parameters():
        if "blocks." in name and name.endswith((".weight", ".packed")) and "lora_" not in name and x.dim() == 2:
            local = x.to_local() if isinstance(x, DTensor) else x
            held += local.untyped_storage().nbytes()
    return held


def _train(
    rank: int, world: int, folder: Path, name: str, weights: str, kind: type, settings: dict[str, Any]
) -> tuple[float, dict[str, Tensor], int, dict[str, Tensor]]:
    """Loss, gradients, bytes before and after a step, and the quantised weights."""
    fabric = fabric_of(rank, world, kind(**settings))
    model: Any = (meta_transformer if kind is FSDP else load_transformer)(folder, dtype=torch.float32)
    quantize_base(model, weights)
    adapted(model)
    if name == "wan":
        model.enable_gradient_checkpointing()
    host = offload_blocks(model) if kind is CP and name == "wan" else None
    wrapped = fabric.setup(model)
    loss = loss_of(wrapped, inputs(name))
    fabric.backward(loss)
    if host is not None:
        assert host.copied == [0]
        host.release()
    packed = {path: whole(x.packed) for path, x in model.named_modules() if isinstance(x, QuantizedLinear)}
    return loss.item(), _gradients(model), _bytes(model), packed


@pytest.mark.parametrize(
    ("name", "weights", "kind", "settings"),
    [
        ("wan", "nf4", FSDP, {"ring": 3}),
        ("wan", "int8", CP, {"ulysses": 2, "ring": 2}),
        ("flux", "int8", FSDP, {"ring": 2, "replicate": 2}),
        ("wan", "fp8", FSDP, {"ring": 2, "reshard_after_forward": False}),
    ],
)
@pytest.mark.default(1)
def test_gradients_are_those_of_the_dequantised_weights(
    run_ranks: RankPool, folders: dict[str, Path], name: str, weights: str, kind: type, settings: dict[str, Any]
) -> None:
    folder, world = folders[name], settings.get("ring", 1) * settings.get("ulysses", 1) * settings.get("replicate", 1)
    plain, quantized = (load_transformer(folder, dtype=torch.float32) for _ in range(2))
    whole_bytes = _bytes(plain)
    quantize_base(quantized, weights)
    expected_bytes = _bytes(quantized)
    assert expected_bytes < (0.2 if weights == "nf4" else 0.3) * whole_bytes
    layers = {path: x for path, x in quantized.named_modules() if isinstance(x, QuantizedLinear)}
    for path, layer in layers.items():
        plain.get_submodule(path).weight.data = layer.dequantized()
    loss = loss_of(adapted(plain), inputs(name))
    loss.backward()
    expected = _gradients(plain)
    largest = max(float(x.abs().max()) for x in expected.values())
    held = 0
    for found_loss, gradients, own_bytes, packed in run_ranks(
        world, _train, folder, name, weights, kind, settings, init=False
    ):
        assert found_loss == pytest.approx(loss.item(), rel=1e-5)
        assert gradients.keys() == expected.keys()
        for key, x in expected.items():
            torch.testing.assert_close(
                gradients[key], x, rtol=1e-4, atol=1e-5 * largest, msg=lambda m, k=key: f"{k}: {m}"
            )
        assert packed.keys() == {f"{path}.base_layer" if f"{path}.base_layer" in packed else path for path in layers}
        for path, x in packed.items():
            assert torch.equal(x, layers[path.removesuffix(".base_layer")].packed)
        held += own_bytes
        share = settings.get("replicate", 1) / world if kind is FSDP else 1.0
        assert own_bytes <= 1.2 * share * expected_bytes, "rows are padded to equal shards"
    assert held >= expected_bytes * (settings.get("replicate", 1) if kind is FSDP else world)


def test_a_quantised_base_cannot_be_merged(folders: dict[str, Path]) -> None:
    model: Any = load_transformer(folders["wan"], dtype=torch.float32)
    quantize_base(model, "nf4")
    adapted(model)
    with pytest.raises(RuntimeError, match="single memory location"):
        model.fuse_lora()
