"""Ranks with a GPU each, over NCCL: exact, without waiting for the device, in graphs and under torch.compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor

from lightning_cp import ContextParallelConfig, apply_context_parallel, capture_forward, context_parallel_attention
from tests.reference import max_error

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")]
TOKENS, HEADS, HEAD_DIM = 1024, 4, 64
MODES = [("ring_degree", "allgather"), ("ring_degree", "alltoall"), ("ulysses_degree", "allgather")]


def _steps(rank: int, world: int, store: str, degree: str, method: str) -> None:
    """Against one process: eager, without a wait for the device; replayed from a graph; compiled."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device)
    config = ContextParallelConfig(**{degree: world}, rotate_method=method)  # type: ignore[arg-type]
    lengths, mine = [TOKENS // world] * world, slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    torch.manual_seed(0)
    whole = [torch.randn(1, TOKENS, HEADS, HEAD_DIM, device="cuda") for _ in range(4)]
    leaves, grad = [x[:, mine].to(torch.bfloat16).clone().requires_grad_() for x in whole[:3]], whole[3][:, mine]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, parallel_config=config, q_lengths=lengths, kv_lengths=lengths)

    def step() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype)))

    exact = [x.double().to(torch.bfloat16).double().requires_grad_() for x in whole[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in exact)).transpose(1, 2)
    expected = [x[:, mine] for x in (out.detach(), *torch.autograd.grad(out, exact, whole[3].double()))]

    def error(found: tuple[Tensor, ...]) -> float:
        return max(max_error(x.cpu(), y.cpu()) for x, y in zip(found, expected, strict=True))

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    eager = step()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    compiled = torch.compile(attend, fullgraph=True)(*leaves)
    assert error(eager) < 5e-2
    assert error(captured) < 5e-2
    assert max_error(compiled.detach().cpu(), expected[0].cpu()) < 5e-2
    dist.destroy_process_group()


@pytest.mark.parametrize(("degree", "method"), MODES)
def test_attention_over_nccl(tmp_path: Path, degree: str, method: str) -> None:
    torch.multiprocessing.spawn(_steps, args=(2, str(tmp_path / "store"), degree, method), nprocs=2)


def _replays(rank: int, world: int, store: str, degree: str, method: str) -> None:
    """Two sizes in turn from graphs, 1,000 times; the results of each size stay those of its eager forward."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device)
    sizes: Any = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2, "ffn_dim": 64, "text_dim": 32}
    torch.manual_seed(0)
    with device:
        model = WanTransformer3DModel(**sizes, freq_dim=32).bfloat16().eval()
        calls = [
            (torch.randn(1, 16, 3, side, side).bfloat16(), torch.full((1,), 10.0), torch.randn(1, 7, 32).bfloat16())
            for side in (6, 10)
        ]
    apply_context_parallel(model, ContextParallelConfig(**{degree: world}, rotate_method=method))  # type: ignore[arg-type]
    with torch.no_grad():
        expected = [model(*call, return_dict=False)[0] for call in calls]
        release = capture_forward(model)
        for number in range(1000):
            found = model(*calls[number % 2], return_dict=False)[0]
        assert torch.equal(found, expected[1])
        assert torch.equal(model(*calls[0], return_dict=False)[0], expected[0])
    release()
    dist.destroy_process_group()


@pytest.mark.parametrize(("degree", "method"), MODES)
def test_two_sizes_in_turn_are_replayed_over_nccl(tmp_path: Path, degree: str, method: str) -> None:
    torch.multiprocessing.spawn(_replays, args=(2, str(tmp_path / "store"), degree, method), nprocs=2)
