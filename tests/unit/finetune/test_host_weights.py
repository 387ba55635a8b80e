"""Blocks of which the frozen weights stay in host memory: order of the copies, exactness, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.finetune.host_weights import HostWeights, offload_blocks
from lightning_cp.finetune.quantize import quantize_base
from lightning_cp.finetune.settings import LoraSettings
from tests.dist.finetune.test_finetune_lora import loss_of
from tests.models import TINY
from tests.pretrained import inputs


def adapted(name: str = "flux", weights: str | None = None) -> Any:
    """A model with activation checkpointing and a LoRA with values."""
    model: Any = TINY[name].build().float().train()
    if weights is not None:
        quantize_base(model, weights)
    add_lora(model, LoraSettings(rank=2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.add_(torch.randn(x.shape, generator=generator) * 0.1)
    model.enable_gradient_checkpointing()
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("weights", [None, "nf4"])
@pytest.mark.parametrize("name", ["flux", "wan"])
@pytest.mark.default(1)
def test_blocks_are_copied_ahead_of_use_and_freed_and_gradients_are_equal(name: str, weights: str | None) -> None:
    model, plain = adapted(name, weights), adapted(name, weights)
    host = offload_blocks(model)
    blocks = list(host._units)
    last = len(blocks) - 1
    frozen = [{key: x for key, x in block.named_parameters() if not x.requires_grad} for block in blocks]
    values = [{key: x.clone() for key, x in of_block.items()} for of_block in frozen]
    seen: list[tuple[int, list[int]]] = []

    def record(i: int) -> Any:
        def hook(block: nn.Module, *_: object) -> None:
            here = dict(block.named_parameters())
            assert all(here[key] is not x for key, x in frozen[i].items()), "it runs with copies"
            assert all(torch.equal(here[key], x) for key, x in frozen[i].items())
            seen.append((i, host.copied))

        return hook

    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(record(i))
    for _ in range(2):
        seen.clear()
        found, expected = loss_of(model, inputs(name)), loss_of(plain, inputs(name))
        forward = [i for i, _ in seen]
        found.backward()
        expected.backward()
        assert forward == list(range(last + 1))
        assert [i for i, _ in seen[last + 1 :]] == forward[::-1], "recomputed in reverse"
        assert all(i in copied and len(copied) <= 2 for i, copied in seen)
        assert [copied for i, copied in seen[1:last]] == [[i, i + 1] for i in range(1, last)], "the next one is there"
        assert [copied for i, copied in seen[last + 2 : -1]] == [[i - 1, i] for i in range(last - 1, 0, -1)]
        assert torch.equal(found, expected)
    assert gradients(model).keys() == gradients(plain).keys()
    assert all(torch.equal(x, gradients(plain)[key]) for key, x in gradients(model).items())
    host.release()
    for block, of_block, before in zip(blocks, frozen, values, strict=True):
        here = dict(block.named_parameters())
        assert all(here[key] is x and torch.equal(x, before[key]) for key, x in of_block.items())


def test_a_copy_of_the_model_has_its_own_weights() -> None:
    model = adapted()
    host = offload_blocks(model)
    loss_of(model, inputs("flux"))
    copied = copy.deepcopy(model)
    assert torch.equal(loss_of(copied, inputs("flux")), loss_of(model, inputs("flux")))
    host.release()
    loss_of(copied, inputs("flux"))
    assert host.copied == []


def test_what_cannot_be_offloaded_is_refused() -> None:
    model = adapted()
    model.disable_gradient_checkpointing()
    with pytest.raises(ValueError, match="FluxTransformer2DModel needs activation checkpointing"):
        offload_blocks(model)
    model.enable_gradient_checkpointing()
    model.transformer_blocks[0].compile()
    with pytest.raises(ValueError, match="FluxTransformer2DModel is compiled"):
        offload_blocks(model)
    with pytest.raises(ValueError, match="Linear has no lists of blocks"):
        offload_blocks(nn.Linear(2, 2))


def test_weights_of_several_units_are_freed_when_another_runs() -> None:
    owner = nn.ModuleList(nn.Linear(2, 2).requires_grad_(False) for _ in range(4)).append(nn.Linear(2, 2))
    host = HostWeights(owner, list(owner)[:4], ahead=True)
    for i, copied in ((0, [0, 1]), (2, [2, 3]), (1, [0, 1]), (3, [3])):
        owner[i](torch.ones(2))
        assert host.copied == copied
