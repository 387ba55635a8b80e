"""Features of a context-parallel model in addition to training: LoRA, autocast, inference, kernels, copies."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel, selective_checkpoint
from lightning_cp.attention import call, gathered, heads, keys, operator
from lightning_cp.engine.sharding import specs as sharding
from lightning_cp.errors import KernelError, PlanError
from tests.dist.attention.test_counting import counted
from tests.dist.compare import averaged, outcome, worst
from tests.harness import RankPool
from tests.models import TINY
from tests.models.flux import flux
from tests.models.wan import wan

_EXACT = 1e-9


def _with_lora(model: nn.Module) -> None:
    from peft import LoraConfig

    targets = ["to_q", "to_k", "to_v", "to_out.0", "proj_out"]
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=targets))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def _lora(rank: int, world: int, name: str, before: bool) -> tuple[float, float]:
    model, arguments = TINY[name].build(), TINY[name].arguments()
    single = copy.deepcopy(model)
    _with_lora(single)
    expected, gradients = outcome(single, arguments)
    if before:
        _with_lora(model)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    if not before:
        outcome(model, arguments)
        _with_lora(model)
    out, found = outcome(model, arguments)
    result = float((out - expected).abs().max()), worst(averaged(found, world), gradients)
    assert any(gradient is not None for gradient in gradients.values())
    remove_context_parallel(model)
    alone, _ = outcome(model, arguments)
    assert torch.equal(alone, expected)
    return result


@pytest.mark.parametrize(("name", "before"), [("flux", True), ("wan", False)])
@pytest.mark.default(1)
def test_a_lora_is_exact_before_and_after(run_ranks: RankPool, name: str, before: bool) -> None:
    for output, gradient in run_ranks(3, _lora, name, before):
        assert output < _EXACT
        assert gradient < _EXACT


def _inference(rank: int, world: int, name: str) -> float:
    model, arguments = TINY[name].build(), TINY[name].arguments()
    expected = model(**arguments, return_dict=False)[0].detach()
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world))
    errors = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = model(**arguments).sample
            assert not out.requires_grad
            errors.append(float((out - expected).abs().max()))
    first, *rest = arguments.values()
    named = dict(zip(list(arguments)[1:], rest, strict=True))
    errors.append(float((model(first, **named).sample.detach() - expected).abs().max()))  # by position
    return max(errors)


def test_inference_mode_and_positional_arguments_work(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _inference, "wan")) < 1e-5  # with the model's float32 casts


def _shard_positions(rank: int, world: int) -> tuple[list[int], float]:
    """Tensors sharded in a forward with and without gradients, and the error if a block changes its positions."""
    model, arguments = wan().build(), wan().arguments()
    apply_context_parallel(model, ContextParallelConfig(ulysses_degree=world))
    sharded = []
    for mode in (torch.enable_grad, torch.no_grad):
        with mock.patch.object(sharding, "narrow", wraps=sharding.narrow) as narrow, mode():
            model(**arguments)
        sharded.append(narrow.call_count)

    def clear(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        for x in args[3]:  # cosines and sines of this rank's positions, here views of the whole tensors
            x.zero_()

    for block in model.blocks:
        block.register_forward_hook(clear)
    expected = model(**arguments).sample.detach()
    with torch.no_grad():
        changed = model(**arguments).sample
    return sharded, float((changed - expected).abs().max())


def test_blocks_share_the_shard_of_one_tensor_unless_it_was_changed(run_ranks: RankPool) -> None:
    blocks = len(wan().build().blocks)
    for (with_gradients, without), error in run_ranks(2, _shard_positions):
        assert with_gradients - without == 2 * (blocks - 1)
        assert error < 1e-6


def _under_autocast(model: nn.Module, arguments: dict[str, Any]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)  # of rms_norm
        out = model(**arguments, return_dict=False)[0]
    out.float().square().sum().backward()
    return [out.detach().float(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _distance(some: list[Tensor], others: list[Tensor]) -> Tensor:
    pairs = list(zip(some, others, strict=True))
    return torch.stack([(a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-6) for a, b in pairs])


def _autocast(rank: int, world: int) -> tuple[float, float]:
    model = flux().build().float()
    arguments = {
        k: x.float() if torch.is_tensor(x) and x.is_floating_point() else x for k, x in flux().arguments().items()
    }
    with mock.patch.object(torch, "autocast", mock.MagicMock()):
        exact = _under_autocast(model, arguments)
    single = _under_autocast(model, arguments)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    out, *gradients = _under_autocast(model, arguments)
    named = averaged({str(i): g for i, g in enumerate(gradients)}, world)
    ours = [out, *(g for g in named.values() if g is not None)]
    return float(_distance(ours, exact).square().mean().sqrt()), float(_distance(single, exact).square().mean().sqrt())


def test_under_autocast_errors_are_those_of_one_process(run_ranks: RankPool) -> None:
    for ours, single in run_ranks(3, _autocast):
        assert 1e-4 < single < 0.3
        assert ours <= 1.5 * single


def _checkpointed(rank: int, world: int, ring: int, rotate: str, how: str) -> tuple[int, int, float]:
    """Attentions and bytes sent in a step, and the error of its gradients."""
    tiny = TINY["wan"]
    model, arguments = tiny.build(), tiny.arguments()
    model.train()
    _, expected = outcome(model, arguments)
    apply_context_parallel(model, ContextParallelConfig(ring, world // ring, rotate_method=rotate))
    if how == "whole":
        model.enable_gradient_checkpointing()
    if how == "selective":
        model.enable_gradient_checkpointing(gradient_checkpointing_func=selective_checkpoint)
    exchanges = mock.patch.object(operator, "prepare_attention", wraps=operator.prepare_attention)
    with exchanges as attentions, counted() as traffic:
        _, found = outcome(model, arguments)
    sent = traffic.ring_bytes + traffic.ulysses_bytes
    return attentions.call_count, sent, worst(averaged(found, world), expected)


@pytest.mark.parametrize(("world", "ring", "rotate"), [(3, 3, "allgather"), (4, 4, "grid")])
@pytest.mark.default(1)
def test_selective_checkpointing_redoes_no_attention(run_ranks: RankPool, world: int, ring: int, rotate: str) -> None:
    ways = ("none", "whole", "selective")
    kept, whole, selective = (run_ranks(world, _checkpointed, ring, rotate, how) for how in ways)
    for (kept_calls, kept_bytes, _), (calls, sent, _), (few_calls, few_sent, error) in zip(
        kept, whole, selective, strict=True
    ):
        assert (calls, few_calls) == (2 * kept_calls, kept_calls)
        assert few_sent == kept_bytes < sent
        assert error < 1e-9


def kernels_used(action: Callable[[], object]) -> set[str]:
    """Names of the kernels that attention asked for."""
    asked: set[str] = set()
    original = keys.Ring.kernel_for

    def kernel_for(ring: keys.Ring, *args: Any) -> Any:
        asked.add(ring.kernel)
        return original(ring, *args)

    with mock.patch.object(keys.Ring, "kernel_for", kernel_for):
        action()
    return asked


def _backends(rank: int, world: int) -> list[str]:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    with mock.patch.object(Registry, "_active_backend", Registry._active_backend):  # set_attention_backend changes it
        return _every_backend(world, Registry)


def _every_backend(world: int, registry: Any) -> list[str]:
    from diffusers.models.attention_dispatch import attention_backend

    config, arguments = ContextParallelConfig(ring_degree=world), flux().arguments()

    def kernels(model: nn.Module) -> set[str]:
        with torch.no_grad():
            return kernels_used(lambda: model(**arguments))

    model = flux().build()
    model.set_attention_backend("_native_math")
    apply_context_parallel(model, config)
    assert kernels(model) == {"math"}
    model.set_attention_backend("_native_flash")
    assert kernels(model) == {"flash"}
    model.reset_attention_backend()
    assert kernels(model) == {"flash"}  # diffusers leaves the last one set active for all models
    for name, kernel in (("_native_math", "math"), ("native", "auto"), ("flex", "auto")):
        with attention_backend(name):
            assert kernels(model) == {kernel}

    messages = []
    with mock.patch.object(registry, "_active_backend", "xformers"), pytest.raises(KernelError) as caught:
        model(**arguments)
    messages.append(str(caught.value))
    remove_context_parallel(model)
    model.transformer_blocks[0].attn.processor._attention_backend = "xformers"
    with pytest.raises(KernelError) as caught:
        apply_context_parallel(model, config)
    messages.append(str(caught.value))
    assert not model._forward_pre_hooks
    return messages


def test_backends_set_before_and_after_select_our_kernel_or_raise(run_ranks: RankPool) -> None:
    for told in run_ranks(2, _backends):
        assert "'xformers'" in told[0]
        assert "'xformers'" in told[1]
        assert all("_native_flash" in message for message in told)


_ENVIRONMENT = """
import torch
from lightning_cp import ContextParallelConfig, apply_context_parallel
from tests.models.wan import wan
from tests.dist.engine.test_engine_features import kernels_used
model = wan().build()
apply_context_parallel(model, ContextParallelConfig(ring_degree=1))
print(kernels_used(lambda: model(**wan().arguments())))
"""


@pytest.mark.full
def test_the_backend_of_the_environment_selects_our_kernel() -> None:
    environment = {**os.environ, "DIFFUSERS_ATTN_BACKEND": "_native_math"}
    ran = subprocess.run([sys.executable, "-c", _ENVIRONMENT], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "{'math'}" in ran.stdout


def _neighbours(rank: int, world: int) -> list[float]:
    """One of three models of one class is parallel, and a deep copy of it is, too. Returns: errors."""
    parallel, single, arguments = wan().build(), wan().build(), wan().arguments()
    expected, gradients = outcome(single, arguments)
    apply_context_parallel(parallel, ContextParallelConfig(ring_degree=world))
    average, errors = copy.deepcopy(parallel), []
    for model in (parallel, single, average, parallel):
        out, found = outcome(model, arguments)
        errors += [float((out - expected).abs().max()), worst(averaged(found, world), gradients)]
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.5)
    errors.append(float((outcome(parallel, arguments)[0] - expected).abs().max()))
    remove_context_parallel(average)
    with pytest.raises(ValueError, match="nothing to remove"):
        remove_context_parallel(average)
    return [*errors, float((outcome(parallel, arguments)[0] - expected).abs().max())]


def test_models_beside_a_parallel_one_are_undisturbed_and_copies_are_parallel(run_ranks: RankPool) -> None:
    for errors in run_ranks(3, _neighbours):
        assert max(errors) < _EXACT


def _theirs(rank: int, world: int) -> list[str]:
    import diffusers

    model = flux().build()
    attributes = set(model.__dict__)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    messages = []
    with pytest.raises(RuntimeError) as already:
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ring_degree=world))
    messages.append(str(already.value))
    remove_context_parallel(model)
    assert set(model.__dict__) == attributes
    with mock.patch.object(torch.accelerator, "device_count", return_value=world):  # theirs divides by it, on CPU too
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=world))
    with pytest.raises(PlanError) as refused:
        apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    messages.append(str(refused.value))
    return messages


def test_their_parallelism_and_ours_refuse_each_other(run_ranks: RankPool) -> None:
    for told in run_ranks(2, _theirs):
        assert "parallel" in told[0].lower()
        assert "diffusers' own parallelism" in told[1]


def _exchanges(rank: int, world: int, name: str, ring: int, ulysses: int) -> tuple[int, int, int]:
    """Numbers of exchanges of sizes, around the ring and of Ulysses in a forward, inside the model."""
    model, arguments = TINY[name].build(), TINY[name].arguments()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses))
    model(**arguments)
    with (
        torch.no_grad(),
        mock.patch.object(call, "all_gather_ints", wraps=call.all_gather_ints) as sizes,
        mock.patch.object(gathered, "gather_flat", wraps=gathered.gather_flat) as packets,
        mock.patch.object(heads, "exchange_flat", wraps=heads.exchange_flat) as swaps,
    ):
        model(**arguments)
    return sizes.call_count, packets.call_count, swaps.call_count


@pytest.mark.parametrize("name", ["flux_short_text", "cogvideox"])
@pytest.mark.default(1)
def test_no_layer_exchanges_sizes(run_ranks: RankPool, name: str) -> None:
    for sizes, packets, _ in run_ranks(3, _exchanges, name, 3, 1):
        assert sizes == 0
        assert packets > 0


def test_cross_attention_on_replicated_keys_sends_nothing(run_ranks: RankPool) -> None:
    layers = 2
    for sizes, packets, collectives in run_ranks(2, _exchanges, "wan", 1, 2):
        assert (sizes, packets) == (0, 0)
        assert collectives == 2 * layers  # q, k, v in one and the output in another, of self-attention alone
