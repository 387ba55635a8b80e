"""LoRA adapters of a parallel pipeline, changed between calls, give one process's latents after each change."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from lightning_cp.errors import PeerMismatchError, PlanError
from tests import features
from tests.dist.compare import of_first_rank
from tests.harness import RankPool
from tests.pipelines import PIPES

TARGETS = ("attn.to_q", "attn.to_v", "attn.to_out.0", "ff.net.2")


def _pipe(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    pipe = PIPES["flux_true_cfg"].make()
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(dtype)


def _latents(pipe: Any) -> Tensor:
    inputs = PIPES["flux_true_cfg"].inputs()
    return torch.as_tensor(pipe(**inputs, generator=torch.Generator().manual_seed(7)).images)


def _adapter(pipe: Any, seed: int, rank: int, blocks: str = "") -> dict[str, Tensor]:
    """The weights of an adapter for attention and feed-forward."""
    made, draw = {}, torch.Generator().manual_seed(seed)
    for path, module in pipe.transformer.named_modules():
        path = path.removesuffix(".base_layer")
        if f"transformer.{path}.lora_A.weight" in made or not path.endswith(TARGETS) or blocks not in path:
            continue
        wide, out = (
            getattr(module, "base_layer", module).in_features,
            getattr(module, "base_layer", module).out_features,
        )
        made[f"transformer.{path}.lora_A.weight"] = torch.randn(rank, wide, generator=draw)
        made[f"transformer.{path}.lora_B.weight"] = torch.randn(out, rank, generator=draw) / 4
    return made


def _load(name: str, seed: int, rank: int = 4, blocks: str = "", **others: Any) -> Callable[[Any], None]:
    return lambda pipe: pipe.load_lora_weights(_adapter(pipe, seed, rank, blocks), adapter_name=name, **others)


CHANGES: list[tuple[str, Callable[[Any], None]]] = [
    ("load", _load("one", 1)),
    ("load another", _load("two", 2, rank=3, blocks="transformer_blocks.0")),
    ("weights", lambda pipe: pipe.set_adapters(["one", "two"], [0.7, 0.4])),
    ("set", lambda pipe: pipe.set_adapters("two")),
    ("disable", lambda pipe: pipe.disable_lora()),
    ("enable", lambda pipe: pipe.enable_lora()),
    ("fuse", lambda pipe: pipe.fuse_lora(lora_scale=0.5, adapter_names=["two"])),
    ("unfuse", lambda pipe: pipe.unfuse_lora()),
    ("delete", lambda pipe: pipe.delete_adapters("two")),
    ("set the other", lambda pipe: pipe.set_adapters("one", 0.9)),
    ("unload", lambda pipe: pipe.unload_lora_weights()),
    ("load for swaps", lambda pipe: (pipe.enable_lora_hotswap(target_rank=6), _load("style", 3)(pipe))),
    ("swap", _load("style", 4, rank=6, hotswap=True)),
    ("swap to a smaller one", _load("style", 5, rank=2, hotswap=True)),
]


def _change(pipe: Any, change: Callable[[Any], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of peft: there is an adapter already, or none is fused
        change(pipe)


def _compile(pipe: Any) -> None:
    pipe.transformer.compile_repeated_blocks(backend="aot_eager", fullgraph=True)


def _changed(rank: int, world: int, settings: dict[str, Any], compiled: str, before: int) -> dict[str, Any]:
    """By change: the error, and how much it changes.

    Args: compiled: "before" the set-up; "": not at all. before: number of changes made before the set-up.
    """
    dtype = torch.float64
    one, pipe = _pipe(dtype), _pipe(dtype)

    def changed(change: Callable[[Any], None]) -> Tensor:
        _change(one, change)
        return _latents(one)

    for _, change in CHANGES[:before]:
        _change(pipe, change)
    if compiled == "before":
        _compile(pipe)
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world), **settings)
    found, last = {}, of_first_rank(lambda: _latents(one))
    for i, (name, change) in enumerate(CHANGES):
        expected = of_first_rank(partial(changed, change))
        if i >= before:
            _change(pipe, change)
        if i + 1 < before:
            continue
        latents = _latents(pipe)
        error = float((latents - expected).abs().max() / expected.abs().max())
        found[name] = error, float((expected - last).abs().max() / expected.abs().max())
        last = expected
    weights = [x for key, x in pipe.transformer.named_parameters() if "blocks." in key and "lora_" not in key]
    assert all(isinstance(x, DTensor) for x in weights) == bool(settings), "weights are no longer sharded"
    return found


SHARD = {"shard": ["transformer"]}


@pytest.mark.parametrize(
    ("settings", "compiled", "before"),
    [
        ({}, "", 0),
        (SHARD, "", 3),
        (SHARD, "before", 0),  # compiled: 2 to 5 minutes
    ],
)
@pytest.mark.full
def test_adapters_changed_between_calls_give_one_process_latents(
    run_ranks: RankPool, settings: dict[str, Any], compiled: str, before: int
) -> None:
    for found in run_ranks(3, _changed, settings, compiled, before, timeout_s=900):
        print({name: f"{error:.0e} {change:.0e}" for name, (error, change) in found.items()})
        for name, (error, change) in found.items():
            assert error <= 1e-10, name
            assert change > 1e-3 or name == "unfuse", f"{name} changes nothing"  # the adapter stays active
            if compiled:
                features.compared("LoRA hot-swap, compiled blocks (with sharded weights: compiled first)", error)
            elif settings:
                features.compared("LoRA hot-swap, sharded weights", error)
            else:
                features.compared("LoRA hot-swap: load, set, disable, fuse, unfuse, unload, swap", error)


def _swapped(rank: int, world: int) -> int:
    """Swap adapters of two ranks into compiled blocks. Returns: number of code objects that this compiles."""
    pipe = _pipe(torch.float32)
    _compile(pipe)
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
    pipe.enable_lora_hotswap(target_rank=6)
    _change(pipe, _load("style", 3))
    _latents(pipe)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed, size in ((4, 6), (5, 2)):
        _change(pipe, _load("style", seed, rank=size, hotswap=True))
        _latents(pipe)
    assert compiled > 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) - compiled


@pytest.mark.full
def test_a_swap_compiles_no_block_again(run_ranks: RankPool) -> None:
    assert run_ranks(3, _swapped, timeout_s=400) == [0] * 3


def _refused(rank: int, world: int) -> list[str]:
    pipe, said = _pipe(torch.float32), []
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world), **SHARD)
    _change(pipe, _load("one", 1))
    for refused in (
        lambda: pipe.fuse_lora(safe_fusing=True),
        lambda: pipe.transformer.add_adapter(LoraConfig(use_dora=True, target_modules=["to_q"]), "dora"),
        lambda: pipe.transformer.add_adapter(LoraConfig(init_lora_weights="pissa", target_modules=["to_q"]), "pissa"),
    ):
        with pytest.raises(PlanError) as caught:
            refused()
        said.append(str(caught.value))
    if rank == 1:
        _change(pipe, _load("two", 2))
    with pytest.raises(PeerMismatchError, match="adapters of transformer"):
        _latents(pipe)
    return said


def test_what_cannot_be_changed_is_refused_and_ranks_must_have_equal_adapters(run_ranks: RankPool) -> None:
    features.refused("adapters with DoRA or PiSSA, and `safe_fusing`, with sharded weights")
    for safe, dora, pissa in run_ranks(3, _refused, timeout_s=240):
        assert safe.startswith("the weights of transformer are sharded (shard='transformer'), and safe_fusing=True")
        assert "and DoRA needs the norms of whole weights" in dora
        assert "and init_lora_weights='pissa' needs whole weights" in pissa


def _in_stages(rank: int, world: int) -> tuple[list[float], list[str]]:
    """With stages of blocks: errors after changes of adapters, and what is refused."""
    first, *changes = [change for name, change in CHANGES if "fuse" not in name]
    pipe, alone = _pipe(torch.float64), []
    for change in (first, *changes):
        _change(pipe, change)
        alone.append(_latents(pipe))
    pipe = _pipe(torch.float64)
    _change(pipe, first)
    parallelize_pipeline(pipe, ContextParallelConfig(), pipe=world)
    found = [_latents(pipe)]
    for change in changes:
        _change(pipe, change)
        found.append(_latents(pipe))
    said = []
    dora = LoraConfig(use_dora=True, target_modules=["to_q"])
    for refused in (lambda: pipe.transformer.add_adapter(dora, "dora"), pipe.fuse_lora):
        with pytest.raises(PlanError) as caught:
            refused()
        said.append(str(caught.value))
    errors = [float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, alone, strict=True)]
    return errors, said


def test_stages_of_blocks_load_adapters_before_and_after_set_up(run_ranks: RankPool) -> None:
    features.refused("fusing adapters on stages of blocks (`pipe=`)")
    for errors, (dora, fuse) in run_ranks(3, _in_stages, timeout_s=120):
        assert max(errors) < 1e-12
        assert "with pipe=3, this rank has only the blocks of its stage, and DoRA needs the norms" in dora
        assert "fuse_lora: with pipe=3" in fuse
