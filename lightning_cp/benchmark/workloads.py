"""The work: attention alone, a training step, a step of sampling; each done by every subject."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp.attention import context_parallel_attention
from lightning_cp.benchmark import peers
from lightning_cp.benchmark.subject import ALL_THREADS, ALONE, ONE_THREAD, Subject, modes
from lightning_cp.comm.shards import shard_range, shard_sizes
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine import apply_context_parallel

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_LR = 1e-6


def attention(config: DictConfig, length: int, device: torch.device) -> list[Subject]:
    """Forward and backward of attention over `length` tokens: q, k, v [batch, length, heads, head_dim]."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes, mine = shard_sizes(length, world), shard_range(length, world, rank)

    def step_of(attend: Attend, *, sharded: bool) -> Callable[[], object]:
        generator = torch.Generator().manual_seed(0)
        shape = (config.batch, length, config.heads, config.head_dim)
        whole = [torch.randn(shape, generator=generator).to(device, getattr(torch, config.dtype)) for _ in range(4)]
        q, k, v, grad = (x[:, mine.start : mine.stop].clone() if sharded else x for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def step() -> None:
            torch.autograd.grad(attend(*leaves), leaves, grad)

        return step

    def ours(settings: ContextParallelConfig) -> Callable[[], object]:
        given: dict[str, Any] = {"parallel_config": settings, "q_lengths": sizes, "kv_lengths": sizes}
        return step_of(functools.partial(context_parallel_attention, **given), sharded=True)

    def theirs(build: Callable[[Sequence[int]], Attend]) -> Callable[[], object]:
        return step_of(build(sizes), sharded=True)

    found = _alone(lambda: step_of(_plain_attention, sharded=False), device)
    found += [Subject(name, functools.partial(ours, settings)) for name, settings in modes(world).items()]
    found.append(Subject("gathered K and V", lambda: step_of(peers.attend_gathered, sharded=True)))
    theirs_by_name = peers.attentions(device)
    return found + [Subject(name, functools.partial(theirs, x), is_peer=True) for name, x in theirs_by_name.items()]


def training(config: DictConfig, device: torch.device) -> list[Subject]:
    """A training step of a transformer: forward, mean squared error, backward, mean of gradients, SGD."""

    def step_of(model: nn.Module, *, averaged: bool) -> Callable[[], object]:
        optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
        arguments = _arguments(config, device)
        trained = nn.parallel.DistributedDataParallel(model) if averaged else model

        def step() -> None:
            out = trained(**arguments)[0]
            torch.autograd.backward(F.mse_loss(out, torch.ones_like(out)))
            optimizer.step()
            optimizer.zero_grad()

        return step

    return _of_model(config, device, step_of, copied=copy.deepcopy)


def sampling(config: DictConfig, device: torch.device) -> list[Subject]:
    """A step of sampling with guidance: a transformer's forward with both branches in one batch, without gradients."""

    def step_of(model: nn.Module, *, averaged: bool) -> Callable[[], object]:
        arguments = {name: _twice(x) for name, x in _arguments(config, device).items()}

        def step() -> None:
            with torch.inference_mode():
                model(**arguments)

        return step

    def copied(model: nn.Module) -> nn.Module:
        return copy.deepcopy(model, {id(x): x for x in model.parameters()})  # which are not written to

    return _of_model(config, device, step_of, copied=copied)


def _of_model(
    config: DictConfig,
    device: torch.device,
    step_of: Callable[..., Callable[[], object]],
    *,
    copied: Callable[[nn.Module], nn.Module],
) -> list[Subject]:
    """Every subject with a model of its own, of equal weights."""
    torch.manual_seed(0)
    with device:
        model: nn.Module = instantiate(config.model, _convert_="all").to(getattr(torch, config.dtype))

    def ours(settings: ContextParallelConfig) -> Callable[[], object]:
        mine = copied(model)
        apply_context_parallel(mine, settings)
        return step_of(mine, averaged=True)

    def theirs(enable: Callable[[nn.Module], nn.Module]) -> Callable[[], object]:
        return step_of(enable(copied(model)), averaged=True)

    found = _alone(lambda: step_of(copied(model), averaged=False), device)
    found += [Subject(name, functools.partial(ours, x)) for name, x in modes(dist.get_world_size()).items()]
    theirs_by_name = peers.models(device)
    return found + [Subject(name, functools.partial(theirs, x), is_peer=True) for name, x in theirs_by_name.items()]


def _alone(build: Callable[[], Callable[[], object]], device: torch.device) -> list[Subject]:
    """One process, with one thread and with as many as there are cores."""
    if device.type == "cuda":
        return [Subject(ALONE, build, alone=True)]
    cores = torch.multiprocessing.cpu_count()
    return [
        Subject(ONE_THREAD, build, alone=True, threads=1),
        Subject(ALL_THREADS, build, alone=True, threads=cores),
    ]


def _plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _arguments(config: DictConfig, device: torch.device) -> dict[str, Any]:
    """Of the transformer's forward, for one sample: random tensors of the shapes given."""
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, config.dtype)
    tensors = {
        name: torch.rand(tuple(shape), generator=generator).to(device, dtype) for name, shape in config.inputs.items()
    }
    return {**tensors, "return_dict": False}


def _twice(x: Any) -> Any:
    """Two samples of one; what has no batch stays."""
    return torch.cat([x, x]) if isinstance(x, Tensor) and x.shape[0] == 1 else x
