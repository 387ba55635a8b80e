"""Stage `host`: CPU time of the thread that calls attention, which limits the speed of short sequences on fast devices.

Tensors are tiny and collectives send nothing, so almost all of the time is that of Python and of PyTorch's dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from lightning_cp.attention import context_parallel_attention
from lightning_cp.compat.torch_names import fake_world
from lightning_cp.recipes.benchmarks import peers
from lightning_cp.recipes.benchmarks.gpu.results import Measurement, Result
from lightning_cp.recipes.benchmarks.gpu.timing import passes_in_turn
from lightning_cp.recipes.benchmarks.subject import example_inputs, parallel
from lightning_cp.recipes.runs.ranks import modes

_PEER = "diffusers Ulysses"
# (mode, ranks, pass) -> largest time as a multiple of diffusers' Ulysses in the same pass and run
GOALS = {
    ("Ulysses", 2, "forward"): 0.5,
    ("Ulysses", 8, "forward"): 0.5,
    ("Ulysses", 2, "with backward"): 0.5,
    ("Ulysses", 8, "with backward"): 0.5,
    ("ring allgather", 8, "forward"): 1.05,
    ("unified", 8, "forward"): 1.0,
}
_PASSES = ("forward", "with backward")


def host_times(config: DictConfig) -> Iterator[Measurement]:
    """Measure an attention call, a block of a model and a compiled block by number of ranks, and diffusers' Ulysses."""
    for ranks in config.host.ranks:
        yield f"attention, {ranks} ranks", functools.partial(_measure_attention, config, ranks)
    for ranks in config.host.ranks:
        yield f"block, {ranks} ranks", functools.partial(_measure_block, config, ranks, False)
    for ranks in config.host.compiled_ranks:
        yield f"compiled block, {ranks} ranks", functools.partial(_measure_block, config, ranks, True)


def _measure_attention(config: DictConfig, ranks: int, result: Result) -> None:
    settings, device = config.host, torch.device(config.device)
    shape = (1, settings.tokens, settings.heads, settings.head_dim)
    dtype, lengths = getattr(torch, config.attention.dtype), [settings.tokens] * ranks

    def steps_of(attend: Callable[..., Tensor]) -> list[Callable[[], object]]:
        tensors = [torch.randn(shape, device=device).to(dtype).requires_grad_(index < 3) for index in range(4)]
        *leaves, grad = tensors

        def forward() -> None:
            with torch.no_grad():
                attend(*leaves)

        return [forward, lambda: torch.autograd.backward(attend(*leaves), grad)]

    with fake_world(ranks):
        attend = functools.partial(context_parallel_attention, q_lengths=lengths, kv_lengths=lengths)
        steps = {name: steps_of(functools.partial(attend, parallel_config=x)) for name, x in modes(ranks).items()}
        steps[_PEER] = steps_of(peers.attentions(device)[_PEER]())
        times_by_mode = _times(steps, settings, device)
    _add_rows(f"One attention call, {ranks} ranks", times_by_mode, result)
    for name, times in times_by_mode.items():
        for which, seconds, peer in zip(_PASSES, times, times_by_mode[_PEER], strict=True):
            goal = GOALS.get((name, ranks, which))
            if goal is not None:
                result.add_check(f"{name}, {ranks} ranks, {which}: host time over {_PEER}", seconds / peer, goal)


def _measure_block(config: DictConfig, ranks: int, compiled: bool, result: Result) -> None:
    """Measure a block as the difference of two models, so that what a forward does once does not count."""
    settings, device = config.host, torch.device(config.device)
    few, many = 1, 1 + settings.blocks

    def model_of(blocks: int) -> nn.Module:
        from diffusers import WanTransformer3DModel

        torch.manual_seed(0)
        sizes = {"num_layers": blocks, "ffn_dim": 16, "text_dim": 8, "freq_dim": 8, "in_channels": 4, "out_channels": 4}
        heads = {"num_attention_heads": settings.heads, "attention_head_dim": settings.head_dim}
        model = WanTransformer3DModel(**heads, **sizes)
        converted: nn.Module = model.to(device, getattr(torch, config.attention.dtype))
        return converted

    def steps_of(make: Callable[[nn.Module], nn.Module], blocks: int) -> list[Callable[[], object]]:
        model = make(model_of(blocks))
        if compiled:
            model.compile_repeated_blocks()  # type: ignore[operator]
        inputs = example_inputs(model, device, frames=ranks, height=4, width=settings.tokens, text=4)

        def forward() -> None:
            with torch.no_grad():
                model(**inputs)

        def with_backward() -> None:
            model(**inputs)[0].sum().backward()
            model.zero_grad()

        return [forward, with_backward]

    with fake_world(ranks):
        makers: dict[str, Callable[[nn.Module], nn.Module]] = {"one process": lambda model: model}
        for name, mode in modes(ranks).items():
            makers[name] = functools.partial(parallel, mode=mode)
        makers[_PEER] = peers.models(device)[_PEER]
        steps = {(name, n): steps_of(make, n) for name, make in makers.items() for n in (few, many)}
        times = _times(steps, settings, device)
    pairs = {name: zip(times[name, few], times[name, many], strict=True) for name in makers}
    each = {name: [(b - a) / settings.blocks for a, b in pair] for name, pair in pairs.items()}
    _add_rows(f"One {'compiled ' * compiled}block of a Wan transformer, {ranks} ranks", each, result)


def _times(
    steps: Mapping[Any, list[Callable[[], object]]], settings: DictConfig, device: torch.device
) -> dict[Any, list[float]]:
    """Measure seconds of thread CPU time per call."""
    measured = passes_in_turn(steps, rounds=settings.rounds, calls=settings.calls, device=device)
    return {name: [times.host_s for times in each] for name, each in measured.items()}


def _add_rows(title: str, times_by_mode: Mapping[str, list[float]], result: Result) -> None:
    columns = ["mode", *(f"{which}, {unit}" for which in _PASSES for unit in ("µs", f"× {_PEER}"))]
    for name, times in times_by_mode.items():
        pairs = zip(times, times_by_mode[_PEER], strict=True)
        cells = [cell for s, peer in pairs for cell in (f"{1e6 * s:,.0f}", f"{s / peer:.2f}")]
        result.add_row(title, columns, [name, *cells])
