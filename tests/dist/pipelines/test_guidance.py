"""CFG branches over a cfg axis: lazy tensors, functions for custom loops, prompts over data groups, errors."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import WanPipeline
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_cp import ContextParallelConfig, apply_context_parallel, parallelize_pipeline, unparallelize_pipeline
from lightning_cp.engine.caches import StepCaches
from lightning_cp.errors import GuidanceError, PeerMismatchError
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.pipelines import (
    cfg_merge,
    cfg_split,
    gather,
    parallel_pipeline,
    sample_prompts,
    sampling_ranks,
    split,
)
from lightning_cp.pipelines.guidance.branches import BranchRunner, guidance_may_start_late
from lightning_cp.pipelines.lazy_tensor import LazyTensor
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool
from tests.harness.cases import and_others
from tests.pipelines import PIPES
from tests.pipelines.tiny import error_of


def _ranks(rank: int, cfg: int) -> SampleGroups:
    return sampling_ranks(ContextParallelConfig(), cfg=cfg)


class Counted(nn.Module):
    """Return the argument in a tuple, and count the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, str]:
        self.calls += 1
        return x * scale, "kept"


def _installed(model: nn.Module) -> Any:
    """The attributes of a transformer that BranchRunner reads: it has no step caches, and keeps no keys."""
    return SimpleNamespace(
        module=model,
        caches=StepCaches(model, session=None),  # type: ignore[arg-type]
        model_plan=SimpleNamespace(keeps_keys={}),
        signature=inspect.signature(type(model).forward),
    )


def _arithmetic(x: Tensor) -> Tensor:
    mask = torch.tensor([[[0.0], [2.0]]])
    out = 1 - (0.5 + x[:, :2] * mask - mask) / 2
    mask.fill_(99)
    return out


HOW: dict[str, Callable[[Tensor], Tensor]] = {
    "untouched": lambda x: x,
    "views": lambda x: x[:, 2:].reshape(2, 2).unsqueeze(0).transpose(1, 2),
    "copies": lambda x: (-x.double()[:, :3].to(torch.float32)).clone(),
    "arithmetic": _arithmetic,
    "numpy": lambda x: torch.from_numpy(np.asarray(x) + x.numpy()) + torch.tensor(x.tolist()),
}


def _reading(rank: int, world: int, how: str) -> tuple[list[float], int, int]:
    """Two steps of as many branches as there are ranks. Their results are read in some way between the calls."""
    calls = BranchRunner("a loop", _ranks(rank, world))
    model, found = Counted(), list[float]()
    x = torch.arange(6.0).view(1, 6)
    with torch.no_grad():
        for step in range(4):
            outs: list[Any] = []
            for branch in range(world):
                out, word = calls.call(_installed(model), model, (x + step + branch,), {})
                assert word == "kept"
                assert isinstance(out, LazyTensor)
                outs.append(HOW[how](out))
            found += [float(x) for x in torch.cat(outs).flatten()]
    return found, model.calls, calls.shared


def test_a_branch_that_needs_the_one_before_is_refused(run_ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"computes one branch at a time.*needs one branch to compute the next"):
        run_ranks(3, _reading, "numpy")


@pytest.mark.parametrize("ways", and_others(("views", "arithmetic", "copies", "untouched")))
@pytest.mark.default(1)
def test_a_promise_is_kept_however_it_is_read(run_ranks: RankPool, ways: list[str]) -> None:
    world, x = 3, torch.arange(6.0).view(1, 6)
    for how in ways:
        outs = [HOW[how](x + step + branch) for step in range(4) for branch in range(world)]
        expected = [y for out in outs for y in out.flatten().tolist()]
        for rank, (found, calls, shared) in enumerate(run_ranks(world, _reading, how)):
            assert found == expected, how
            assert calls == (4 if rank == 0 else 5)  # its own of each step, and the first of all: it gives the shapes
            assert shared == 4 * world


def _lonely(rank: int, world: int) -> tuple[list[float], int]:
    """Results that are read between the calls of a step, while other steps are distributed: exact, and no error."""
    calls = BranchRunner("a loop", _ranks(rank, world))
    model, found = Counted(), list[float]()
    with torch.no_grad():
        for step in range(4):
            outs = [
                calls.call(_installed(model), model, (torch.full((1, 2), 10.0 * step + branch),), {})[0]
                for branch in range(2)
            ]
            found += [float(x.sum()) for x in outs]
            alone = calls.call(_installed(model), model, (torch.full((1, 2), 5.0 * step),), {})[0]
            found.append(float(alone.sum()))
    return found, calls.shared


def test_steps_without_guidance_among_others_are_exact(run_ranks: RankPool) -> None:
    expected = [y for step in range(4) for y in (20.0 * step, 20.0 * step + 2, 10.0 * step)]
    assert run_ranks(2, _lonely) == [(expected, 8)] * 2


def _autocast(rank: int, world: int) -> list[tuple[torch.dtype, bool]]:
    """Calls of equal arguments without autocast, with it, and in another of its types: types, and whether exact."""
    torch.manual_seed(0)
    calls, model, found = BranchRunner("a loop", _ranks(rank, world)), nn.Linear(4, 3), []
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                given = [torch.full((1, 4), 1.0 + branch) for branch in range(world)]
                outs = [calls.call(_installed(model), model, (x,), {}) for x in given]
                exact = [torch.equal(torch.cat([out]), model(x)) for out, x in zip(outs, given)]
                found += [(out.dtype, same) for out, same in zip(outs, exact)]
    return found


def test_calls_with_and_without_autocast_are_exact(run_ranks: RankPool) -> None:
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)
    assert run_ranks(3, _autocast) == [[(dtype, True) for dtype in types for _ in range(3)]] * 3


def _own_loop(rank: int, world: int, ring: int, ulysses: int, cfg: int, rows: int) -> tuple[float, int]:
    """Run a custom sampling loop with a custom model. Returns: the largest error, and the samples of its batches."""
    torch.manual_seed(3)
    model, text = Plain().double(), torch.randn(rows, 1, 16, dtype=torch.float64)
    noise = torch.randn(1, 7, 16, dtype=torch.float64).expand(rows, -1, -1)
    mixing = torch.randn(3, 16, dtype=torch.float64)
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    ranks, met = sampling_ranks(config, cfg=cfg), list[int]()

    def sample(denoise: Any) -> Tensor:
        x = noise
        for step in range(3):
            velocity = denoise(x, text * (step + 1))
            x = x - 0.3 * (velocity @ mixing).mean(0, keepdim=True)
        return x

    def alone(x: Tensor, text: Tensor) -> Tensor:
        return model(x + text)[0]

    def together(x: Tensor, text: Tensor) -> Tensor:
        mine = cfg_split({"x": x, "text": text}, ranks)
        met.append(len(mine["x"]))
        return cfg_merge(model(mine["x"] + mine["text"])[0], ranks)

    with torch.no_grad():
        expected = sample(alone)
        apply_context_parallel(model, config, PLAIN_PLAN)
        actual = sample(together)
        parts = split(actual, 1, ranks)
        assert torch.equal(gather(parts, 1, ranks), actual)
    assert parts.shape[1] in (7 // (ring * ulysses), -(-7 // (ring * ulysses)))
    return float((actual - expected).abs().max()), met[0]


@pytest.mark.parametrize(("ring", "ulysses", "cfg", "rows"), [(2, 1, 2, 2), (1, 2, 2, 3), (1, 1, 3, 4)])
@pytest.mark.default("2-3")
def test_a_custom_loop_with_split_and_gather_is_exact(
    run_ranks: RankPool, ring: int, ulysses: int, cfg: int, rows: int
) -> None:
    answers = run_ranks(ring * ulysses * cfg, _own_loop, ring, ulysses, cfg, rows)
    assert all(error < 1e-13 for error, _ in answers)
    met = [met for _, met in answers[:: ring * ulysses]]
    assert sum(met) == rows
    assert max(met) - min(met) <= 1


def _pipe() -> Any:
    return PIPES["wan"].pipe()


def _refused(rank: int, world: int, what: str) -> str:
    pipe, inputs = _pipe(), PIPES["wan"].inputs()
    config, cfg = ContextParallelConfig(), 2
    if what == "no guidance":
        inputs["guidance_scale"] = 1.0
    if what == "prompt":
        inputs["prompt"] = f"rank {rank}"
    if what == "generator":
        inputs["generator"] = torch.Generator() if rank == 0 else None
    if what == "gradients":
        parallelize_pipeline(pipe, config, cfg=2)
        installed = parallel_pipeline(pipe)
        assert installed is not None
        with pytest.raises(GuidanceError) as told:
            installed.branch_runner.call(installed.transformers["transformer"], pipe.transformer, (torch.zeros(1),), {})
        return str(told.value)
    if what == "tangents":
        parallelize_pipeline(pipe, config, cfg=2)
        installed = parallel_pipeline(pipe)
        assert installed is not None

        def call(x: Tensor) -> Any:
            return installed.branch_runner.call(installed.transformers["transformer"], pipe.transformer, (x,), {})

        with torch.no_grad(), pytest.raises(NotImplementedError) as refused:
            torch.func.jvp(call, (torch.zeros(1),), (torch.ones(1),))
        return str(refused.value)
    if what == "exchanged":
        parallelize_pipeline(pipe, config, cfg=2)
        pipe.transformer = _pipe().transformer
        with pytest.raises(ValueError, match=r"transformer was replaced") as exchanged:
            pipe(**inputs)
        return str(exchanged.value)
    if what == "noise of another":
        parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=2))
        other = WanPipeline.from_pipe(pipe)
        alike = [other(**inputs, generator=torch.Generator().manual_seed(7))[0] for _ in range(3)]
        assert torch.equal(alike[0], alike[2])
        with pytest.raises(PeerMismatchError) as told:
            other(**inputs, generator=torch.Generator().manual_seed(7 + rank))
        return str(told.value)
    if what == "cfg":
        cfg = 3
    if what == "mesh":
        config = ContextParallelConfig(
            mesh=init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("cfg", "ring", "ulysses"))
        )
        cfg = 4
    try:
        parallelize_pipeline(pipe, config, cfg=cfg)
        if what == "twice":
            parallelize_pipeline(pipe, config, cfg=cfg)
        inputs["num_inference_steps"] = 4
        pipe(**inputs)
    except (ValueError, PeerMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


_REFUSED = {
    "no guidance": "GuidanceError: cfg=2, but WanPipeline computes one branch at a time: guidance is off",
    "prompt": "PeerMismatchError: .*prompt has 'rank 1' on one and 'rank 0' on the other",
    "generator": r"PeerMismatchError: .*generator is on \['cpu'\] on one rank and on no device on the other",
    "gradients": "cfg=2 is for sampling only, but WanTransformer3DModel is called with gradients enabled",
    "tangents": "a pipeline with cfg=2 has no forward derivative",
    "exchanged": "WanPipeline.transformer was replaced after parallelize_pipeline",
    "noise of another": "the contents of hidden_states differ",
    "cfg": "ValueError: cfg=3 x ring=1 x ulysses=1 = 3 must divide the world size 2",
    "mesh": "ValueError: cfg=4 contradicts the mesh: its axis 'cfg' has size 2",
    "twice": "PlanError: WanPipeline is already context-parallel",
}


@pytest.mark.parametrize("whats", and_others(_REFUSED, 3))
@pytest.mark.default(3)
def test_pipeline_calls_that_cannot_be_distributed_are_refused_on_every_rank(
    run_ranks: RankPool, whats: list[str]
) -> None:
    for what in whats:
        for answer in run_ranks(2, _refused, what):
            assert re.search(_REFUSED[what], answer), answer


def _prompts(rank: int, world: int, ring: int, count: int, per_call: int, folder: str) -> list[float]:
    pipe, inputs = _pipe(), PIPES["wan"].inputs()
    del inputs["prompt"]
    texts = ["a cat", "a very slow dog", "", "two birds", "rain", "a house, far away"][: count + 1]

    def write(number: int, sample: Any) -> None:
        path = Path(folder) / f"{number}.{rank}"
        assert not path.exists()
        path.write_text(repr(float(torch.as_tensor(sample).double().norm())))

    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=ring))
    (Path(folder) / "prompts.txt").write_text("\n".join(texts)) if rank == 0 else None
    dist.barrier()
    found = sample_prompts(pipe, Path(folder) / "prompts.txt", seed=11, per_call=per_call, write=write, **inputs)
    again = sample_prompts(pipe, texts, seed=11, collect=False, **inputs)
    installed = parallel_pipeline(pipe)
    assert installed is not None
    assert len(again) <= -(-count // installed.ranks.data_size)
    dist.barrier()
    return [float(torch.as_tensor(x).double().norm()) for x in found]


@pytest.mark.parametrize(("world", "ring", "per_call"), [(3, 1, 2), (4, 2, 1)])
@pytest.mark.default(1)
def test_prompts_are_shared_over_data_groups_in_order_and_written_once(
    run_ranks: RankPool, world: int, ring: int, per_call: int
) -> None:
    pipe, inputs = _pipe(), PIPES["wan"].inputs()
    texts = ["a cat", "a very slow dog", "two birds", "rain", "a house, far away"]
    expected = []
    for i, text in enumerate(texts):
        generator = [torch.Generator().manual_seed(11 + i)]
        expected.append(float(pipe(**{**inputs, "prompt": [text]}, generator=generator)[0].double().norm()))
    with tempfile.TemporaryDirectory() as folder:
        for found in run_ranks(world, _prompts, ring, 5, per_call, folder):
            assert found == pytest.approx(expected, rel=1e-4)
        written = sorted(path.name for path in Path(folder).glob("*.[0-9]"))
        assert [name.split(".")[0] for name in written] == ["0", "1", "2", "3", "4"]
        assert all(int(name.split(".")[1]) % ring == 0 for name in written)


def _shares_a_transformer(rank: int, world: int) -> float:
    """A pipeline made from a parallel one by diffusers' `from_pipe`, with branches of guidance."""
    pipe, inputs = _pipe(), PIPES["wan"].inputs()
    alone = pipe(**inputs, generator=torch.Generator().manual_seed(7))[0]
    parallelize_pipeline(pipe, ContextParallelConfig(), cfg=2)
    other = WanPipeline.from_pipe(pipe)
    found = other(**inputs, generator=torch.Generator().manual_seed(7))[0]
    unparallelize_pipeline(pipe)
    return error_of(alone, found)


def test_a_pipeline_made_from_a_parallel_one_is_exact(run_ranks: RankPool) -> None:
    assert all(error < 1e-4 for error in run_ranks(2, _shares_a_transformer))


def _undone_in_any_order(rank: int, world: int) -> bool:
    pipes = [_pipe(), _pipe()]
    pipes[1].scheduler = pipes[0].scheduler
    kind, found = type(pipes[0].scheduler), dict(pipes[0].scheduler.__dict__)
    for pipe in pipes:
        parallelize_pipeline(pipe, ContextParallelConfig(), cfg=2)
    assert type(pipes[0].scheduler) is kind, "which BriaPipeline asks for"
    for pipe in pipes:
        unparallelize_pipeline(pipe)
    return type(pipes[0].scheduler) is kind and pipes[0].scheduler.__dict__.keys() == found.keys()


def test_pipelines_that_share_a_scheduler_are_undone_in_any_order(run_ranks: RankPool) -> None:
    assert run_ranks(2, _undone_in_any_order) == [True, True]


@pytest.mark.parametrize("start", [0.0, 0.6])
def test_guidance_may_begin_late_where_a_guider_or_an_argument_says_so(start: float) -> None:
    pipe = type("Pipe", (), {"guider": type("Guider", (), {"_start": start})()})()
    assert guidance_may_start_late(pipe, {}) == (start > 0)
    assert guidance_may_start_late(object(), {"cfg_interval_start": start, "prompt": "a start"}) == (start > 0)


def _default_noise(rank: int, world: int) -> tuple[float, float]:
    """Without a generator, ranks draw what one process would with the first one's seed."""
    pipe, inputs = _pipe(), PIPES["wan"].inputs()
    torch.manual_seed(5)
    alone = pipe(**inputs)[0]
    parallelize_pipeline(pipe, ContextParallelConfig(ulysses_degree=world))
    torch.manual_seed(5 + rank)
    together = pipe(**inputs)[0]
    after = float(torch.rand(()))
    unparallelize_pipeline(pipe)
    return error_of(alone, together), after


def test_without_a_generator_all_ranks_draw_the_noise_of_the_first(run_ranks: RankPool) -> None:
    answers = run_ranks(3, _default_noise)
    assert all(error < 1e-4 for error, _ in answers)
    assert len({after for _, after in answers}) == 1
