"""Ranks with a GPU each, over NCCL: exact, without waiting for the device, in graphs and under torch.compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp import ContextParallelConfig, context_parallel_attention
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
