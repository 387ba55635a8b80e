"""Workloads: attention, a training step, a sampling step. Each subject does the same work."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp.attention import context_parallel_attention
from lightning_cp.attention.heads import assign_heads
from lightning_cp.comm.shards import shard_range, shard_sizes
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.apply import parallelize
from lightning_cp.mesh.sample_groups import sample_groups_for
from lightning_cp.pipelines.apply import parallelize_pipeline
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.guidance.step_clock import StepClock
from lightning_cp.pipelines.lazy_tensor import resolve_all
from lightning_cp.pipelines.pipefusion.runner import make_patch_runners
from lightning_cp.recipes.benchmarks import peers
from lightning_cp.recipes.benchmarks.subject import (
    ALL_THREADS,
    HEADS_CALL,
    ONE_THREAD,
    QUERIES_CALL,
    SINGLE_RANK,
    UNCHECKED,
    Subject,
    copy_sharing_weights,
    parallel,
)
from lightning_cp.recipes.runs.ranks import modes
from lightning_cp.undoable import intercept_calls

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_LR = 1e-6
_PATCHES, _STEPS = (4, 8), 8


def attention(config: DictConfig, length: int, device: torch.device) -> list[Subject]:
    """List the subjects for forward and backward of attention: q, k, v [batch, length, heads, head_dim]."""
    _, own_tokens = shards(length)
    step_of = functools.partial(attention_step, config, length, device)

    def sharded(x: Tensor) -> Tensor:
        return x[:, own_tokens]

    def peer(build: Callable[[], Attend]) -> Callable[[], object]:
        return step_of(build(), sharded)

    subjects = one_process_subjects(lambda: step_of(_plain_attention), device)
    subjects += _calls(step_of, config.heads, length) + _own_modes(step_of, length)
    subjects.append(Subject("gathered K and V", lambda: step_of(peers.attend_gathered, sharded)))
    peer_builders = peers.attentions(device)
    return subjects + [Subject(name, functools.partial(peer, x), is_peer=True) for name, x in peer_builders.items()]


def one_rank(config: DictConfig, length: int, device: torch.device) -> list[Subject]:
    """List the subjects for rank 0's share of `attention` without transfers, and single calls with the same FLOPs.

    Ranks: one, in a simulated world (the "fake" backend, which sends nothing).
    """
    step_of = functools.partial(attention_step, config, length, device)
    # On a GPU use the same kernel as our modes: PyTorch may choose another one.
    call = _lightning_cp_kernel if device.type == "cuda" else _plain_attention
    subjects = one_process_subjects(lambda: step_of(call), device)
    return subjects + _calls(step_of, config.heads, length, call) + _own_modes(step_of, length)


def attention_step(
    config: DictConfig,
    length: int,
    device: torch.device,
    attend: Attend,
    shard: Callable[[Tensor], Tensor] | None = None,
    not_sharded: Sequence[int] = (),
) -> Callable[[], object]:
    """Build a step.

    Args:
        attend: attention function.
        shard: function that shards q, k, v and the gradient; None: full tensors.
        not_sharded: indices of the tensors that are not sharded.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape, dtype = (config.batch, length, config.heads, config.head_dim), getattr(torch, config.dtype)
    tensors = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)]
    if shard is not None:
        tensors = [x if index in not_sharded else shard(x).clone() for index, x in enumerate(tensors)]
    *leaves, grad = [x.requires_grad_(index < 3) for index, x in enumerate(tensors)]

    def forward() -> None:
        with torch.no_grad():
            attend(*leaves)

    def step() -> None:
        torch.autograd.grad(attend(*leaves), leaves, grad)

    return step if config.get("backward", True) else forward


def _own_modes(step_of: Callable[..., Callable[[], object]], length: int) -> list[Subject]:
    """List our modes, on this rank's shards."""
    sizes, own_tokens = shards(length)

    def build(settings: ContextParallelConfig) -> Callable[[], object]:
        settings_of_call: dict[str, Any] = {"parallel_config": settings, "q_lengths": sizes, "kv_lengths": sizes}
        return step_of(functools.partial(context_parallel_attention, **settings_of_call), lambda x: x[:, own_tokens])

    subjects = modes(dist.get_world_size())
    return [Subject(name, functools.partial(build, settings)) for name, settings in subjects.items()]


def _calls(
    step_of: Callable[..., Callable[[], object]], heads: int, length: int, call: Attend | None = None
) -> list[Subject]:
    """List a rank's work as a single call without communication: a lower bound for the modes if all ranks run it."""
    _, tokens = shards(length)
    call = call or _plain_attention
    share = assign_heads(heads, heads, dist.get_world_size())[dist.get_rank()].query
    return [
        Subject(QUERIES_CALL, lambda: step_of(call, lambda x: x[:, tokens], not_sharded=(1, 2))),
        Subject(HEADS_CALL, lambda: step_of(call, lambda x: x[:, :, share])),
    ]


def shards(length: int) -> tuple[tuple[int, ...], slice]:
    """Return the number of tokens on each rank, and the slice of this rank's tokens."""
    world = dist.get_world_size()
    own_tokens = shard_range(length, world, dist.get_rank())
    return shard_sizes(length, world), slice(own_tokens.start, own_tokens.stop)


def training(config: DictConfig, device: torch.device) -> list[Subject]:
    """List the subjects for a training step: forward, mean squared error, backward, gradient averaging, SGD."""

    def step_of(model: nn.Module, *, averaged: bool) -> Callable[[], object]:
        optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
        arguments = model_arguments(config, device)
        trained = nn.parallel.DistributedDataParallel(model) if averaged else model

        def step() -> None:
            out = trained(**arguments)[0]
            torch.autograd.backward(F.mse_loss(out, torch.ones_like(out)))
            optimizer.step()
            optimizer.zero_grad()

        return step

    return _model_subjects(config, device, step_of, copied=copy.deepcopy)


def sampling(config: DictConfig, device: torch.device) -> list[Subject]:
    """List the subjects for a sampling step with guidance: forward with both branches in one batch, no gradients."""

    def step_of(model: nn.Module, *, averaged: bool) -> Callable[[], object]:
        arguments = {name: _two_samples(x) for name, x in model_arguments(config, device).items()}

        def step() -> None:
            with torch.inference_mode():
                model(**arguments)

        return step

    subjects = _model_subjects(config, device, step_of, copied=copy_sharing_weights) + _branches(config, device)
    return subjects + _stages(config, device)


class _Loop:
    """A pipeline of a transformer and a scheduler, with guidance: both branches in one batch."""

    def __init__(self, config: DictConfig, device: torch.device) -> None:
        torch.manual_seed(0)  # equal weights on all ranks
        with device:
            model: nn.Module = instantiate(config.model, _convert_="all").to(getattr(torch, config.dtype))
        self.scheduler: Any = FlowMatchEulerDiscreteScheduler()
        self.components = {"transformer": model, "scheduler": self.scheduler}
        self.arguments = model_arguments(config, device)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        model = self.components["transformer"]
        name, x = next((name, x) for name, x in self.arguments.items() if isinstance(x, Tensor))
        self.scheduler.set_timesteps(_STEPS, device=x.device)
        for time in self.scheduler.timesteps:
            inputs = {key: _two_samples(value) for key, value in {**self.arguments, name: x}.items()}
            unguided, guided = model(**inputs)[0].chunk(2)
            x = self.scheduler.step(unguided + 3.0 * (guided - unguided), time, x)[0]
        return x


def _branches(config: DictConfig, device: torch.device) -> list[Subject]:
    """List calls of a pipeline with a branch of guidance on each half of the ranks, with and without comparisons."""
    ranks = dist.get_world_size()

    def build(check_peers: str) -> Callable[[], object]:
        loop = _Loop(config, device)
        parallelize_pipeline(loop, ContextParallelConfig(ring_degree=ranks // 2), cfg=2, check_peers=check_peers)
        return lambda: loop()

    return [
        Subject(f"2 branches{suffix}", functools.partial(build, check_peers), steps=_STEPS)
        for suffix, check_peers in (("", "sampled"), (UNCHECKED, "off"))
        if ranks % 2 == 0
    ]


def _stages(config: DictConfig, device: torch.device) -> list[Subject]:
    """List PipeFusion with all ranks as stages of the blocks: several steps in a row, so that they can overlap."""

    def build(patches: int) -> Callable[[], object]:
        with device:
            model: nn.Module = instantiate(config.model, _convert_="all").to(getattr(torch, config.dtype))
        settings, clock = ContextParallelConfig(), StepClock()
        ranks = sample_groups_for(settings, pipe=dist.get_world_size())
        installed = {"transformer": parallelize(model, settings, check_peers="off")}
        made = make_patch_runners(
            installed, ranks, Votes("the loop", ranks.control), pipe=ranks.pipe, patches=patches, warmup=1, clock=clock
        )
        calls = made["transformer"]
        calls.install()
        calls.release()
        calls.begin(overlaps=True)
        arguments = model_arguments(config, device)
        name, latents = next((name, x) for name, x in arguments.items() if isinstance(x, Tensor))
        intercept_calls(model, calls.call)

        def steps() -> None:
            x = latents
            with torch.no_grad():
                for _ in range(_STEPS):
                    inputs = {key: _two_samples(value) for key, value in {**arguments, name: x}.items()}
                    unguided, guided = model(**inputs)[0].chunk(2)
                    x = x - 0.01 * (unguided + 3.0 * (guided - unguided))
                    clock.end_step()
                resolve_all(x)

        return steps

    ranks = dist.get_world_size()
    return [
        Subject(f"{ranks} stages, {n} patches", functools.partial(build, n), steps=_STEPS)
        for n in _PATCHES
        if ranks > 1
    ]


def _model_subjects(
    config: DictConfig,
    device: torch.device,
    step_of: Callable[..., Callable[[], object]],
    *,
    copied: Callable[[nn.Module], nn.Module],
) -> list[Subject]:
    """List the subjects of a model workload; each subject gets a copy of the same model."""
    torch.manual_seed(0)
    with device:
        model: nn.Module = instantiate(config.model, _convert_="all").to(getattr(torch, config.dtype))

    def own_mode(settings: ContextParallelConfig, check_peers: str = "sampled") -> Callable[[], object]:
        return step_of(parallel(copied(model), settings, check_peers), averaged=True)

    def peer(enable: Callable[[nn.Module], nn.Module]) -> Callable[[], object]:
        return step_of(enable(copied(model)), averaged=True)

    subjects = one_process_subjects(lambda: step_of(copied(model), averaged=False), device)
    for name, x in modes(dist.get_world_size()).items():
        subjects.append(Subject(name, functools.partial(own_mode, x)))
        subjects.append(Subject(name + UNCHECKED, functools.partial(own_mode, x, "off")))
    peer_builders = peers.models(device)
    return subjects + [Subject(name, functools.partial(peer, x), is_peer=True) for name, x in peer_builders.items()]


def one_process_subjects(build: Callable[[], Callable[[], object]], device: torch.device) -> list[Subject]:
    """List one process: with one thread, and with one thread per core."""
    if device.type == "cuda":
        return [Subject(SINGLE_RANK, build, rank_zero_only=True)]
    cores = torch.multiprocessing.cpu_count()
    return [
        Subject(ONE_THREAD, build, rank_zero_only=True, threads=1),
        Subject(ALL_THREADS, build, rank_zero_only=True, threads=cores),
    ]


def _lightning_cp_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return context_parallel_attention(q, k, v, parallel_config=ContextParallelConfig())


def _plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def model_arguments(config: DictConfig, device: torch.device) -> dict[str, Any]:
    """Return arguments of the transformer's forward for one sample: random tensors of the configured shapes."""
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, config.dtype)
    tensors = {
        name: torch.rand(tuple(shape), generator=generator).to(device, dtype) for name, shape in config.inputs.items()
    }
    return {**tensors, "return_dict": False}


def _two_samples(x: Any) -> Any:
    """Repeat a tensor of one sample for two samples; return other values unchanged."""
    return torch.cat([x, x]) if isinstance(x, Tensor) and x.shape[0] == 1 else x
