"""Stage `transformer`: one rank's step of a transformer of FLUX.1's size, compared with diffusers' context parallelism.

Collectives send nothing, so the time is that of the computation, or of the host where it launches more slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from lightning_cp.compat.torch_names import fake_world
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.apply import parallelize
from lightning_cp.engine.graphs import GraphedForward, recorder_for
from lightning_cp.recipes.benchmarks import peers
from lightning_cp.recipes.benchmarks.gpu.results import Measurement, Result
from lightning_cp.recipes.benchmarks.gpu.timing import passes_in_turn
from lightning_cp.recipes.benchmarks.subject import UNCHECKED, copy_sharing_weights, example_inputs, parallel
from lightning_cp.recipes.runs.ranks import modes
from lightning_cp.undoable import intercept_calls

_ALONE, _GRAPH = "a rank's tokens alone", ", CUDA graph"
_PASSES = ("forward", "with backward")
_COLUMNS = ["mode", *(f"{which}, {part}" for which in _PASSES for part in ("ms", "of the host, ms"))]
# mode -> the subject of diffusers in the same mode, which must not be faster
_PEERS = {"Ulysses": "diffusers Ulysses", "ring allgather": "diffusers ring", "unified": "diffusers unified"}


def transformer_times(config: DictConfig) -> Iterator[Measurement]:
    """Measure forward, and forward with backward to the input, in every mode by number of ranks. Weights are frozen."""
    for ranks in config.transformer.ranks:
        yield f"{ranks} ranks", functools.partial(_measure, config, ranks)


def _measure(config: DictConfig, ranks: int, result: Result) -> None:
    device, settings = torch.device(config.device), config.transformer
    model = _flux(config, device)
    image, text = settings.image_tokens, settings.text_tokens
    inputs = example_inputs(model, device, width=2 * image, text=text)

    with fake_world(ranks):
        makers: dict[str, Callable[[nn.Module], nn.Module]] = {}
        for name, mode in modes(ranks).items():
            makers[name] = functools.partial(parallel, mode=mode)
            makers[name + UNCHECKED] = functools.partial(parallel, mode=mode, check_peers="off")
        # A model is parallel for one world only.
        steps = {name: _passes(make(copy_sharing_weights(model)), inputs) for name, make in makers.items()}
        local_inputs = example_inputs(model, device, width=2 * (image // ranks), text=text // ranks)
        steps[_ALONE] = _passes(model, local_inputs)
        memory: dict[str, int] = {}
        if device.type == "cuda":
            for name, mode in modes(ranks).items():
                steps[name + _GRAPH], memory[name + _GRAPH] = _replayed(copy_sharing_weights(model), mode, inputs)
            steps[_ALONE + _GRAPH] = [_captured(steps[_ALONE][0])]
        for name, enable in peers.models(device).items():
            try:
                passes = _passes(enable(copy_sharing_weights(model)), inputs)
                for step in passes:
                    step()
                steps[name] = passes
            except (ValueError, RuntimeError, NotImplementedError) as error:
                result.add_row(f"{ranks} ranks", _COLUMNS, [name, f"{error}".strip().split("\n")[0], "", "", ""])
        times = passes_in_turn(steps, rounds=settings.rounds, calls=settings.calls, device=device)
    for name, each in times.items():
        cells = [f"{1e3 * seconds:.1f}" for of_pass in each for seconds in (of_pass.wall_s, of_pass.host_s)]
        result.add_row(f"{ranks} ranks", _COLUMNS, [name, *cells, *[""] * (len(_COLUMNS) - 1 - len(cells))])
    for name, num_bytes in memory.items():
        ratio = times[name][0].wall_s / times[_ALONE + _GRAPH][0].wall_s
        title = f"{name}, {ranks} ranks: time over the graph of the model alone, memory"
        result.add_check(title, ratio, 1.25, f"{{:.2f}}, {num_bytes / 1e9:.2f} GB for the graph")
    goal = 1.0 if device.type == "cuda" else None
    for name, peer in _PEERS.items():
        if name in times and peer in times:
            for which, ours, theirs in zip(_PASSES, times[name], times[peer], strict=True):
                title = f"{name}, {ranks} ranks, {which}: time over {peer}"
                result.add_check(title, ours.wall_s / theirs.wall_s, goal)


def _flux(config: DictConfig, device: torch.device) -> nn.Module:
    """Build a transformer with random weights in the configured dtype, which do not require gradients."""
    from diffusers import FluxTransformer2DModel

    heads, head_dim, settings = config.attention.heads, config.attention.head_dim, config.transformer
    with torch.device("meta"):  # in float32 it might not fit
        model: Any = FluxTransformer2DModel(
            num_layers=settings.num_layers,
            num_single_layers=settings.num_single_layers,
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            axes_dims_rope=(head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16),
            guidance_embeds=True,
        ).to(getattr(torch, config.attention.dtype))
    model.to_empty(device=device).requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model  # type: ignore[no-any-return]


def _passes(model: nn.Module, inputs: Mapping[str, Any]) -> list[Callable[[], object]]:
    latents: Tensor = inputs["hidden_states"].clone().requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            model(**inputs)

    def with_backward() -> None:
        out = model(**{**inputs, "hidden_states": latents})[0]
        torch.autograd.grad(out, latents, torch.ones_like(out))

    return [forward, with_backward]


def _replayed(
    model: nn.Module, mode: ContextParallelConfig, inputs: Mapping[str, Any]
) -> tuple[list[Callable[[], object]], int]:
    """Run a parallel model in a CUDA graph, as pipelines do. Returns: its forward; bytes of the graph."""
    graphed = GraphedForward(parallelize(model, mode), True, recorder_for)
    intercept_calls(model, graphed.run)
    forward = _passes(model, inputs)[:1]
    for _ in range(3):
        forward[0]()
    return forward, graphed.num_bytes


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    """Capture a step in a CUDA graph. Returns: its replay."""
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
