"""Compiled blocks of one kind share their graphs: a parallel model has as many as one process, and is exact."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_cp import apply_context_parallel
from lightning_cp.comm.shards import shard_sizes
from lightning_cp.engine.recompute import selective_checkpoint
from lightning_cp.fabric import ContextParallelFSDPStrategy
from tests.dist.compare import averaged, outcome, worst
from tests.dist.lightning_ranks import fabric_of, whole
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool
from tests.models import TINY
from tests.models.modes import MODES
from tests.models.tiny import with_short_text

Counts = tuple[list[int], float]  # graphs after each step; the largest error of outputs and gradients
Step = Callable[[dict[str, Any]], tuple[Tensor, dict[str, Tensor | None]]]
TEXTS = (7, 7, 4, 7)  # tokens: two lengths
LONG_TEXTS = (7, 7, 6, 7)  # more than one token on each of 3 ranks: torch makes constants of sizes of 1
# Numbers of blocks, and of graphs for each length. (FLUX: the first single block gets a new tensor, the others a view.)
MODELS = {
    "wan": ({"num_layers": 3}, 1),
    "qwen_image": ({"num_layers": 3}, 1),
    "flux": ({"num_layers": 2, "num_single_layers": 3}, 3),
    "plain": ({}, 2),  # the first block gets a tensor without gradient
}


def _model(name: str) -> nn.Module:
    if name == "plain":
        torch.manual_seed(0)
        return Plain().double()
    return replace(TINY[name], config={**TINY[name].config, **MODELS[name][0]}).build()


def _arguments(name: str, text: int, samples: int) -> dict[str, Any]:
    if name == "plain":
        x = torch.randn(samples, text, 16, generator=torch.Generator().manual_seed(text), dtype=torch.float64)
        return {"x": x}
    given = with_short_text(TINY[name].arguments(), text)
    return {key: x[:samples] if isinstance(x, Tensor) and "ids" not in key else x for key, x in given.items()}


def _counts(
    counter: CompileCounterWithBackend,
    name: str,
    samples: int,
    expect: Step,
    step: Step,
    texts: tuple[int, ...] = TEXTS,
) -> Counts:
    """Run a step with each length, in one process and in parallel."""
    graphs, largest = [], 0.0
    for text in texts:
        arguments = _arguments(name, text, samples)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the compiler's, of diffusers' code
            (expected, gradients), (out, found) = expect(arguments), step(arguments)
        for key, gradient in found.items():  # aot_eager gives 0 to parameters that eager blocks do not reach
            if gradient is not None and gradients[key] is None:
                gradients[key] = torch.zeros_like(gradient)
        largest = max(largest, float((out - expected).abs().max()), worst(found, gradients))
        graphs.append(counter.frame_count)
    return graphs, largest


def _of_ranks(rank: int, world: int, name: str, mode: str, samples: int, backend: str, dynamic: bool = False) -> Counts:
    """Args: mode: of `MODES`; "selective": selective checkpointing; "whole": the model is compiled as a whole."""
    torch.compiler.reset()
    reference = _model(name)
    model: Any = copy.deepcopy(reference)
    if world > 1:
        apply_context_parallel(model, MODES.get(mode, MODES["ring"])(world), PLAIN_PLAN if name == "plain" else None)
    if mode in ("replay", "selective"):
        how = selective_checkpoint if mode == "selective" else None
        model.train().enable_gradient_checkpointing(gradient_checkpointing_func=how)
    counter = CompileCounterWithBackend(backend)
    if name == "plain":
        for block in model.blocks:
            block.compile(backend=counter, fullgraph=True, dynamic=dynamic)
    else:
        compile_ = model.compile if mode == "whole" else model.compile_repeated_blocks
        compile_(backend=counter, fullgraph=True, dynamic=dynamic)

    def step(arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
        out, gradients = outcome(model, arguments)
        return out, averaged(gradients, world) if world > 1 else gradients

    texts = LONG_TEXTS if dynamic else TEXTS
    return _counts(counter, name, samples, lambda arguments: outcome(reference, arguments), step, texts)


@pytest.mark.parametrize(
    ("world", "name", "mode", "samples", "backend"),
    [
        (3, "plain", "ring", 1, "eager"),
        (3, "wan", "whole", 2, "eager"),
        (3, "qwen_image", "replay", 2, "aot_eager"),
        (4, "flux", "grid", 2, "aot_eager"),
        (2, "wan", "ring", 2, "inductor"),
    ],
)
@pytest.mark.default(1)
def test_blocks_of_a_kind_share_one_graph_for_each_length(
    run_ranks: RankPool, world: int, name: str, mode: str, samples: int, backend: str
) -> None:
    """For each length of this rank's part: the last of 4 ranks has one token of 7, and of 4."""
    kinds = 1 if mode == "whole" else MODELS[name][1]
    found = run_ranks(world, _of_ranks, name, mode, samples, backend, timeout_s=300)
    for long, short, (graphs, error) in zip(shard_sizes(7, world), shard_sizes(4, world), found, strict=True):
        both = kinds if long == short and name != "wan" else 2 * kinds  # (Wan's text is not split)
        assert graphs == [kinds, kinds, both, both]
        assert error < 1e-5  # the compiler may see the lifted casts otherwise


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "name", "mode", "samples", "backend"),
    [
        (3, "qwen_image", "ring", 1, "eager"),  # 7 tokens are not split evenly
        (3, "qwen_image", "selective", 1, "aot_eager"),
    ],
)
def test_dynamic_shapes_need_the_same_graphs_for_all_lengths(
    run_ranks: RankPool, world: int, name: str, mode: str, samples: int, backend: str
) -> None:
    """As in one process, the first block of a kind may get a graph of its own: its inputs are views."""
    kinds = MODELS[name][1]
    for graphs, error in run_ranks(world, _of_ranks, name, mode, samples, backend, True, timeout_s=300):
        assert kinds <= graphs[0] <= kinds + 1 or backend != "eager"  # others may be called twice for a graph
        assert graphs == graphs[:1] * len(LONG_TEXTS)
        assert error < 1e-5


def _sharded(rank: int, world: int) -> Counts:
    torch.compiler.reset()
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world))
    reference: Any = _model("wan").float().train()
    model: Any = copy.deepcopy(reference)
    model.enable_gradient_checkpointing()
    counter = CompileCounterWithBackend("eager")
    model.compile_repeated_blocks(backend=counter, fullgraph=True, dynamic=False)
    parallel = fabric.setup(model)

    def step(arguments: dict[str, Any], of: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
        of.zero_grad()
        given = {name: x.float() if x.is_floating_point() else x for name, x in arguments.items()}
        out = of(**given, return_dict=False)[0]
        (fabric.backward if of is parallel else Tensor.backward)(out.square().mean())
        parameters = (reference if of is reference else model).named_parameters()
        return out.detach(), {name: None if p.grad is None else whole(p.grad) for name, p in parameters}

    return _counts(counter, "wan", 2, lambda given: step(given, reference), lambda given: step(given, parallel))


@pytest.mark.full
def test_sharded_blocks_share_one_graph_for_each_length(run_ranks: RankPool) -> None:
    for graphs, error in run_ranks(3, _sharded, init=False, timeout_s=300):
        assert graphs == [1, 1, 2, 2]
        assert error < 1e-4  # in float32


def _adapted(rank: int, world: int, folder: Path) -> tuple[list[int], list[float]]:
    """Swap one LoRA for another in a model compiled as a whole. Returns: graphs and error, with each adapter."""
    from peft import LoraConfig

    torch.compiler.reset()
    arguments, expected = _arguments("wan", 7, 2), []
    for rank_of_lora, alpha in ((4, 4), (6, 3)):
        torch.manual_seed(alpha)
        single: Any = _model("wan")
        single.add_adapter(
            LoraConfig(r=rank_of_lora, lora_alpha=alpha, target_modules=["to_q"], init_lora_weights=False)
        )
        single.double()
        expected.append(single(**arguments, return_dict=False)[0].detach())
        single.save_lora_adapter(folder / f"{rank} {alpha}")
    model: Any = _model("wan")
    apply_context_parallel(model, MODES["ring"](world))
    model.enable_lora_hotswap(target_rank=8)
    counter = CompileCounterWithBackend("eager")
    graphs, errors = [], []
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for alpha, result in zip((4, 3), expected, strict=True):
            model.load_lora_adapter(
                folder / f"{rank} {alpha}", prefix=None, adapter_name="a", use_safetensors=True, hotswap=alpha == 3
            )
            if alpha == 4:
                model.double()
                model.compile(backend=counter, fullgraph=True, dynamic=False)
            out = model(**arguments, return_dict=False)[0]
            errors.append(float((out - result).abs().max()))
            graphs.append(counter.frame_count)
    assert float((expected[0] - expected[1]).abs().max()) > 1e-3
    return graphs, errors


@pytest.mark.full
def test_a_swapped_lora_needs_no_graph(run_ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for graphs, errors in run_ranks(3, _adapted, tmp_path, timeout_s=120):
        assert graphs == [1, 1]
        assert max(errors) < 1e-6


def _exported(rank: int, world: int, copied: bool, package: str | None = None) -> float:
    """Export a model that has not run, or a deep copy of one, and run the program, compiled to a package if given."""
    model, arguments = _model("wan"), {**_arguments("wan", 7, 2), "return_dict": False}
    with torch.no_grad():
        expected = model(**arguments)[0]
        apply_context_parallel(model, MODES["ring"](world))
        if copied:
            model = copy.deepcopy(model)
        with pytest.warns(UserWarning, match="does not compare its arguments between ranks"):
            program = torch.export.export(model, args=(), kwargs=arguments)
        run: Any = program.module()
        if package is not None:
            warnings.filterwarnings("ignore", ".*LeafSpec.*")  # torch's own
            path = torch._inductor.aoti_compile_and_package(program, package_path=f"{package}/rank_{rank}.pt2")
            run = torch._inductor.aoti_load_package(path)
        return float((run(**arguments)[0] - expected).abs().max())


@pytest.mark.full
def test_aotinductor_compiles_an_exported_model(run_ranks: RankPool, tmp_path: Path) -> None:
    for error in run_ranks(2, _exported, True, str(tmp_path), timeout_s=400):
        assert error < 1e-5


@pytest.mark.full
def test_a_model_that_has_not_run_is_exported(run_ranks: RankPool) -> None:
    for error in run_ranks(3, _exported, False):
        assert error < 1e-6
