"""A rank's step on a GPU in a simulated world: no host synchronisation, CUDA graphs, compilation.

Transfers send nothing there, so that these tests are of everything else; test_several_gpus.py has them too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.comm import transfer
from lightning_cp.engine.apply import parallelize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS, TOKENS, HEADS, HEAD_DIM = 4, 512, 8, 64
CONFIGS = {
    "allgather": ContextParallelConfig(ring_degree=4),
    "alltoall": ContextParallelConfig(ring_degree=4, rotate_method="alltoall"),
    "ulysses": ContextParallelConfig(ulysses_degree=4),
    "unified": ContextParallelConfig(ring_degree=2, ulysses_degree=2),
}


@pytest.fixture
def _world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield
    dist.destroy_process_group()


def _step(name: str, key_heads: int) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of one attention, lengths being known."""
    torch.manual_seed(0)
    shapes = [(1, TOKENS, heads, HEAD_DIM) for heads in (HEADS, key_heads, key_heads, HEADS)]
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    lengths = [TOKENS] * RANKS

    def step() -> tuple[Tensor, ...]:
        out = context_parallel_attention(
            *leaves, parallel_config=CONFIGS[name], enable_gqa=True, q_lengths=lengths, kv_lengths=lengths
        )
        return torch.autograd.grad(out, leaves, grad)

    return step


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_never_waits_for_the_device(name: str, key_heads: int) -> None:
    step = _step(name, key_heads)
    step()  # what is chosen and compiled once
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_world")
@pytest.mark.filterwarnings("ignore")  # inductor's own
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_compiles_as_one_graph(name: str) -> None:
    lengths = [TOKENS // RANKS] * RANKS
    q, k, v = (torch.randn(1, TOKENS // RANKS, HEADS, HEAD_DIM, device="cuda", requires_grad=True) for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = {"q_lengths": lengths, "kv_lengths": lengths}
        return context_parallel_attention(q * 2, k, v, parallel_config=CONFIGS[name], **given) * 3

    attend(q, k, v)  # builds the process groups
    with torch._inductor.config.patch(compile_threads=1):  # more would leave processes behind
        compiled = torch.compile(attend, fullgraph=True)(q, k, v)
        compiled.sum().backward()
    assert compiled.shape == q.shape
    assert q.grad is not None
    assert q.grad.shape == q.shape


def _waits(model: nn.Module) -> int:
    """Times that a training step waited for the device."""
    torch.manual_seed(0)
    tokens = torch.randn(1, 16, 4, 8, 8, device="cuda")
    text, timestep = torch.randn(1, 8, 32, device="cuda"), torch.full((1,), 500.0, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(tokens, timestep, text, return_dict=False)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            observer = mock.Mock(**{"gathered.return_value": None})
            with transfer.observing(observer):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not observer.gathered.called, "over NCCL it waits, here it does not"
    texts = [str(warning.message) for warning in told]
    return sum("synchroniz" in text and "prototype" not in text for text in texts)


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_parallel_model_waits_no_more_than_the_model_alone(name: str) -> None:
    with torch.device("cuda"):
        model = WanTransformer3DModel(
            num_attention_heads=4, attention_head_dim=16, num_layers=2, ffn_dim=64, text_dim=32, freq_dim=32
        )
    alone = _waits(model)
    parallelize(model, CONFIGS[name], check_peers="off")
    assert _waits(model) <= alone


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("check_peers", ["off", "sampled"])
@pytest.mark.parametrize("name", [None, *CONFIGS])
def test_a_training_step_of_a_model_is_captured_in_a_graph(name: str | None, check_peers: str) -> None:
    """None: the model alone, which shows that it can be captured at all."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = WanTransformer3DModel(
            num_attention_heads=4, attention_head_dim=16, num_layers=2, ffn_dim=64, text_dim=32, freq_dim=32
        )
        inputs = (torch.randn(1, 16, 4, 8, 8), torch.full((1,), 500.0), torch.randn(1, 8, 32))
    if name is not None:
        parallelize(model, CONFIGS[name], check_peers=check_peers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(*inputs, return_dict=False)[0].square().mean().backward()
        optimizer.step()

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
            optimizer.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    assert len(gradients) > 40
    for gradient in gradients.values():
        gradient.fill_(12345.0)  # NaN may come from buffers in which the pretended transfers leave what was there
    graph.replay()
    torch.cuda.synchronize()
    assert [name for name, gradient in gradients.items() if (gradient == 12345.0).any()] == []
