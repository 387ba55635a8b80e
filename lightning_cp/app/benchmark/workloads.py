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

from lightning_cp.app.benchmark import peers
from lightning_cp.app.benchmark.subject import (
    ALL_THREADS,
    HEADS_CALL,
    ONE_THREAD,
    QUERIES_CALL,
    SINGLE_RANK,
    UNCHECKED,
    Subject,
    modes,
)
from lightning_cp.attention import context_parallel_attention
from lightning_cp.attention.heads import assign_heads
from lightning_cp.comm.shards import shard_range, shard_sizes
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.apply import parallelize

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_LR = 1e-6


def attention(config: DictConfig, length: int, device: torch.device) -> list[Subject]:
    """Forward and backward of attention over `length` tokens: q, k, v [batch, length, heads, head_dim]."""
    sizes, mine = _shards(length)
    step_of = functools.partial(_attention_step, config, length, device)

    def sharded(x: Tensor) -> Tensor:
        return x[:, mine]

    def theirs(build: Callable[[Sequence[int]], Attend]) -> Callable[[], object]:
        return step_of(build(sizes), sharded)

    found = _alone(lambda: step_of(_plain_attention), device)
    found += _calls(step_of, config.heads, length) + _ours(step_of, length)
    found.append(Subject("gathered K and V", lambda: step_of(peers.attend_gathered, sharded)))
    theirs_by_name = peers.attentions(device)
    return found + [Subject(name, functools.partial(theirs, x), is_peer=True) for name, x in theirs_by_name.items()]


def one_rank(config: DictConfig, length: int, device: torch.device) -> list[Subject]:
    """What the first rank computes of `attention`, transfers being free; and single calls of the same products.

    Ranks: one, in a world that is only pretended (the "fake" backend, which sends nothing).
    """
    step_of = functools.partial(_attention_step, config, length, device)
    # On a GPU the same kernel as ours: PyTorch may choose another one.
    call = _own_kernel if device.type == "cuda" else _plain_attention
    found = _alone(lambda: step_of(call), device)
    return found + _calls(step_of, config.heads, length, call) + _ours(step_of, length)


def _attention_step(
    config: DictConfig,
    length: int,
    device: torch.device,
    attend: Attend,
    cut: Callable[[Tensor], Tensor] | None = None,
    whole: Sequence[int] = (),
) -> Callable[[], object]:
    """Args: cut: what of q, k, v and the gradient is used; None: all. whole: indices of those that are not cut."""
    generator = torch.Generator(device).manual_seed(0)
    shape, dtype = (config.batch, length, config.heads, config.head_dim), getattr(torch, config.dtype)
    tensors = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)]
    if cut is not None:
        tensors = [x if index in whole else cut(x).clone() for index, x in enumerate(tensors)]
    *leaves, grad = [x.requires_grad_(index < 3) for index, x in enumerate(tensors)]

    def forward() -> None:
        with torch.no_grad():
            attend(*leaves)

    def step() -> None:
        torch.autograd.grad(attend(*leaves), leaves, grad)

    return step if config.get("backward", True) else forward


def _ours(step_of: Callable[..., Callable[[], object]], length: int) -> list[Subject]:
    """Each of our modes over this rank's shards."""
    sizes, mine = _shards(length)

    def build(settings: ContextParallelConfig) -> Callable[[], object]:
        given: dict[str, Any] = {"parallel_config": settings, "q_lengths": sizes, "kv_lengths": sizes}
        return step_of(functools.partial(context_parallel_attention, **given), lambda x: x[:, mine])

    found = modes(dist.get_world_size())
    return [Subject(name, functools.partial(build, settings)) for name, settings in found.items()]


def _calls(
    step_of: Callable[..., Callable[[], object]], heads: int, length: int, call: Attend | None = None
) -> list[Subject]:
    """A rank's products in a single call, nothing being sent: with all ranks at it, the least that a mode can take."""
    _, tokens = _shards(length)
    call = call or _plain_attention
    share = assign_heads(heads, heads, dist.get_world_size())[dist.get_rank()].query
    return [
        Subject(QUERIES_CALL, lambda: step_of(call, lambda x: x[:, tokens], whole=(1, 2))),
        Subject(HEADS_CALL, lambda: step_of(call, lambda x: x[:, :, share])),
    ]


def _shards(length: int) -> tuple[tuple[int, ...], slice]:
    """Tokens of each rank, and this one's place among all."""
    world = dist.get_world_size()
    mine = shard_range(length, world, dist.get_rank())
    return shard_sizes(length, world), slice(mine.start, mine.stop)


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

    def ours(settings: ContextParallelConfig, check_peers: str = "sampled") -> Callable[[], object]:
        mine = copied(model)
        parallelize(mine, settings, check_peers=check_peers)
        return step_of(mine, averaged=True)

    def theirs(enable: Callable[[nn.Module], nn.Module]) -> Callable[[], object]:
        return step_of(enable(copied(model)), averaged=True)

    found = _alone(lambda: step_of(copied(model), averaged=False), device)
    for name, x in modes(dist.get_world_size()).items():
        found += [
            Subject(name, functools.partial(ours, x)),
            Subject(name + UNCHECKED, functools.partial(ours, x, "off")),
        ]
    theirs_by_name = peers.models(device)
    return found + [Subject(name, functools.partial(theirs, x), is_peer=True) for name, x in theirs_by_name.items()]


def _alone(build: Callable[[], Callable[[], object]], device: torch.device) -> list[Subject]:
    """One process, with one thread and with as many as there are cores."""
    if device.type == "cuda":
        return [Subject(SINGLE_RANK, build, alone=True)]
    cores = torch.multiprocessing.cpu_count()
    return [
        Subject(ONE_THREAD, build, alone=True, threads=1),
        Subject(ALL_THREADS, build, alone=True, threads=cores),
    ]


def _own_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return context_parallel_attention(q, k, v, parallel_config=ContextParallelConfig())


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
