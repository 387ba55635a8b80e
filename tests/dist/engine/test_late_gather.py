"""Losses on shards: values and gradients are those of the whole output, which is not gathered."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.comm import shards
from lightning_cp.engine.sharding import late_gather
from lightning_cp.engine.sharding.late_gather import LateGather
from lightning_cp.engine.sharding.sample_means import sample_means
from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.finetune import LoraSettings, add_lora
from tests.dist.compare import nothing_narrowed
from tests.dist.lightning_ranks import fabric_of, whole
from tests.harness import RankPool
from tests.models.wan import wan

TARGET = torch.randn(2, 4, 3, 6, 10, generator=torch.Generator().manual_seed(5))
MASK = (torch.rand(2, 1, 3, 6, 10, generator=torch.Generator().manual_seed(6)) > 0.3).float()


def _squared(predicted: Tensor, target: Tensor) -> Tensor:
    return (predicted.to(target.dtype) - target).square()


def _loss(model: nn.Module, dtype: torch.dtype, *, masked: bool) -> Tensor:
    """The loss of two samples with different weights. Half of the channels pass through several functions."""
    arguments = {
        "hidden_states": torch.randn(2, 4, 3, 6, 10, generator=torch.Generator().manual_seed(2)).to(dtype),
        "encoder_hidden_states": torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(3)).to(dtype),
        "timestep": torch.tensor([4, 700]),
    }
    output = -2 * model(**arguments, return_dict=False)[0].transpose(2, 3)
    output = torch.stack(list(output.to(dtype).unbind(0))).transpose(2, 3)
    target, mask = TARGET.to(dtype), MASK.to(dtype) if masked else None
    losses = sample_means(_squared, output, target, mask) + 0.1 * sample_means(_absolute, output, target)
    return (losses * torch.tensor([1.0, 3.0], dtype=dtype)).sum()


def _absolute(predicted: Tensor, target: Tensor) -> Tensor:
    return (predicted - target).abs()


def _train(rank: int, world: int, kind: str, ring: int, ulysses: int, lora: bool) -> tuple[float, float, set[int]]:
    """Relative errors of loss and gradients, and the dims along which outputs were gathered."""
    sharded = kind == "cp_fsdp"
    dtype = torch.float32 if sharded else torch.float64
    torch.set_default_dtype(dtype)  # Fabric returns outputs in it
    try:
        with nullcontext() if sharded else nothing_narrowed():
            return _compare(rank, world, kind, dtype, ring, ulysses, lora)
    finally:
        torch.set_default_dtype(torch.float32)


def _compare(
    rank: int, world: int, kind: str, dtype: torch.dtype, ring: int, ulysses: int, lora: bool
) -> tuple[float, float, set[int]]:
    sharded = kind == "cp_fsdp"
    model: Any = wan().build().to(dtype)
    if lora:
        add_lora(model, LoraSettings(rank=2))
    expected_loss = _loss(model, dtype, masked=True)
    expected_loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    model.enable_gradient_checkpointing()
    strategy: Any = (ContextParallelFSDPStrategy if sharded else ContextParallelStrategy)(ring=ring, ulysses=ulysses)
    fabric = fabric_of(rank, world, strategy, precision="32-true" if sharded else "64-true")
    wrapped, _ = fabric.setup(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    gathered: list[tuple[int, ...]] = []
    original = shards.gather_shards

    def recorded(x: Tensor, *arguments: Any) -> Tensor:
        gathered.append(tuple(x.shape))
        return original(x, *arguments)

    with (
        mock.patch.object(late_gather, "gather_shards", recorded),
        mock.patch("lightning_cp.engine.sharding.sample_means.gather_shards", recorded),
    ):
        with strategy.loss_on_shards():
            loss = _loss(wrapped, dtype, masked=True)
        fabric.backward(loss)
    gradients = torch.cat([whole(p.grad).flatten() for p in model.parameters() if p.grad is not None])
    error = float((gradients - expected).norm() / expected.norm())
    return (
        abs(float(loss) / float(expected_loss) - 1),
        error,
        {len(shape) for shape in gathered},
    )


@pytest.mark.parametrize(
    ("kind", "ring", "ulysses", "lora"),
    [
        ("cp", 3, 1, False),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                *[("cp", 2, 1, False), ("cp", 4, 1, False), ("cp", 1, 2, False), ("cp", 2, 2, False)],
                *[("cp", 2, 1, True), ("cp_fsdp", 2, 1, False), ("cp_fsdp", 3, 1, True), ("cp_fsdp", 1, 2, False)],
            )
        ),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole_output(
    kind: str, ring: int, ulysses: int, lora: bool, run_ranks: RankPool
) -> None:
    for loss_error, error, dims in run_ranks(ring * ulysses, _train, kind, ring, ulysses, lora):
        limit = 1e-5 if kind == "cp_fsdp" else 1e-12
        assert loss_error < limit
        assert error < limit
        assert dims == {2}, "only the sums of the samples' losses are gathered"


def _other_functions(rank: int, world: int) -> tuple[bool, str]:
    model = wan().build().float()
    strategy = ContextParallelStrategy(ring=world)
    fabric = fabric_of(rank, world, strategy)
    wrapped = fabric.setup(model)
    arguments = {
        "hidden_states": torch.randn(2, 4, 3, 6, 10, generator=torch.Generator().manual_seed(2)),
        "encoder_hidden_states": torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(3)),
        "timestep": torch.tensor([4, 700]),
    }
    expected = wrapped(**arguments, return_dict=False)[0]
    with strategy.loss_on_shards():
        output = wrapped(**arguments, return_dict=False)[0]
    assert isinstance(output, LateGather)
    assert output.shape == expected.shape
    equal = torch.equal(output.square(), expected.square()) and torch.equal(output[:, :2] + 1, expected[:, :2] + 1)
    equal = equal and torch.equal(output * output, expected * expected) and torch.equal(2 - output, 2 - expected)
    output, target = 1.0 * output, TARGET.clone().requires_grad_()
    (found,) = torch.autograd.grad(strategy.sample_means(_squared, output, target).sum(), target)
    equal = equal and torch.allclose(found, 2 * (target - expected).detach() / TARGET[0].numel())
    equal = equal and not isinstance(wrapped(**arguments, return_dict=False)[0], LateGather)
    with torch.inference_mode(), strategy.loss_on_shards():
        output = wrapped(**arguments, return_dict=False)[0]
        found = strategy.sample_means(_squared, output, TARGET, MASK)
    equal = equal and torch.allclose(found, sample_means(_squared, expected, TARGET, MASK).detach(), rtol=1e-6)
    try:
        output.mul_(2)
    except NotImplementedError as error:
        return equal, str(error)
    return equal, "no error"


def _product(output: Tensor) -> Tensor:
    return sample_means(_squared, torch.einsum("bcthw,bcthw->bcthw", output, output), TARGET)


def _norm_of_channels(output: Tensor) -> Tensor:
    return sample_means(lambda predicted, target: (predicted - target).norm(dim=1), output, TARGET)


def _own_weights(output: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1, 1)
    return sample_means(lambda predicted, target: weights * _squared(predicted, target), output, TARGET)


def _broadcast_target(output: Tensor) -> Tensor:
    return sample_means(_squared, output, TARGET[:, :1])


def _scaled_gradient(output: Tensor) -> Tensor:
    output.register_hook(lambda gradient: 3 * gradient)
    return sample_means(_squared, output, TARGET)


def _added_in_place(output: Tensor) -> Tensor:
    sums = TARGET.clone()
    sums += output
    return sums.square()


def _of_large_half_precision(output: Tensor) -> Tensor:
    target = torch.full_like(TARGET, 200, dtype=torch.float16)
    losses = sample_means(lambda p, t: (p.to(t.dtype) - t).square(), output, target)
    return losses.float() + sample_means(lambda p, t: (p.to(t.dtype) - t).square(), output, target, 1000 * MASK)


_UNUSUAL = (
    *(_product, _norm_of_channels, _own_weights, _broadcast_target),
    *(_scaled_gradient, _added_in_place, _of_large_half_precision),
)


def _unusual(rank: int, world: int) -> dict[str, float]:
    """Relative errors of gradients."""
    model: Any = wan().build().float()
    strategy = ContextParallelStrategy(ring=world)
    fabric = fabric_of(rank, world, strategy)
    wrapped = fabric.setup(model)
    arguments = {name: x.float() if x.is_floating_point() else x for name, x in wan().arguments().items()}
    errors = {}
    for loss in _UNUSUAL:
        found = []
        for context in (nullcontext(), strategy.loss_on_shards()):
            model.zero_grad()
            with context:
                fabric.backward(loss(wrapped(**arguments, return_dict=False)[0]).mean())
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        errors[loss.__name__] = float((found[1] - found[0]).norm() / found[0].norm())
    return errors


@pytest.mark.full
def test_unusual_losses_have_the_gradients_of_the_whole_output(run_ranks: RankPool) -> None:
    for errors in run_ranks(2, _unusual):
        assert all(error < 1e-5 for error in errors.values()), errors  # nan, too


def test_other_functions_gather_the_output_first(run_ranks: RankPool) -> None:
    for equal, message in run_ranks(2, _other_functions):
        assert equal
        assert "mul_ would change a tensor that is not gathered" in message
