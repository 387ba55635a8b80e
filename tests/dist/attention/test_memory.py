"""Bytes that attention allocates, counted at the allocator, by the number of ranks that share one sequence."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, apply_context_parallel, context_parallel_attention
from lightning_cp.attention import gathered
from lightning_cp.comm.packet import BUFFERS
from lightning_cp.recipes.benchmarks.trace import Trace, read_trace, record_trace
from tests.harness import RankPool

TOKENS, HEADS, HEAD_DIM = 2048, 8, 32
UNIT = TOKENS * HEADS * HEAD_DIM * 4  # bytes of q, of k, of v, of the result, of the whole sequence


def _traces(rank: int, world: int, mode: str) -> tuple[Trace, Trace]:
    """Bytes of forward and of backward. The backend's thread frees what it has sent a moment after the transfer."""
    BUFFERS.forget()  # those of other tests could take the place of ours
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, TOKENS // world, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, TOKENS // world, HEADS, HEAD_DIM)
    degrees = {"ulysses_degree": world} if mode == "ulysses" else {"ring_degree": world, "rotate_method": mode}
    config = ContextParallelConfig(**degrees)  # type: ignore[arg-type]
    out: list[Tensor] = []

    def attend() -> Tensor:
        return context_parallel_attention(q, k, v, parallel_config=config)

    torch.autograd.backward(attend(), grad)
    forward = read_trace(record_trace(lambda: (out.append(attend()), time.sleep(0.1))))
    return forward, read_trace(record_trace(lambda: torch.autograd.backward(out.pop(), grad)))


@pytest.mark.parametrize(("world", "mode"), [(2, "ulysses"), (4, "alltoall"), (8, "allgather")])
@pytest.mark.default(2)
def test_what_is_held_for_backward_falls_with_the_number_of_ranks(run_ranks: RankPool, world: int, mode: str) -> None:
    """In addition to its inputs, a ring holds its result; Ulysses holds the exchanged tensors instead of the inputs."""
    held = (5 if mode == "ulysses" else 1) * UNIT / world
    for forward, _ in run_ranks(world, _traces, mode):
        assert held < forward.held_bytes < 1.05 * held


def test_a_rotation_peaks_at_two_remote_chunks(run_ranks: RankPool) -> None:
    """In addition: a partial result and the merged one; in backward the gradients of two chunks."""
    chunk, local = 2 * UNIT / 4, UNIT / 4
    for forward, backward in run_ranks(4, _traces, "alltoall"):
        assert forward.peak_bytes < 1.1 * (2 * chunk + 2 * local)
        # dq twice, dK and dV from the kernel, packed, arriving, and ours at home
        assert backward.peak_bytes < 1.1 * (2 * chunk + 4 * chunk + 2 * local)


def _kept(rank: int, world: int, mode: str) -> list[int]:
    """Bytes that wait for the next call, after each of three."""
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, TOKENS // world, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    config = ContextParallelConfig(ring_degree=world, rotate_method=mode)
    BUFFERS.forget()
    kept = []
    for _ in range(3):
        context_parallel_attention(q, k, v, parallel_config=config).sum().backward()
        kept.append(BUFFERS.kept_bytes)
    return kept


@pytest.mark.parametrize("mode", ["alltoall", "allgather"])
@pytest.mark.default(1)
def test_buffers_are_used_again_by_the_next_call(run_ranks: RankPool, mode: str) -> None:
    """Buffers are returned by forward and backward, and reused: their number does not grow."""
    for first, *rest in run_ranks(3, _kept, mode):
        assert first > 0
        assert rest == [first, first]


def _step_peak(rank: int, world: int, degrees: dict[str, int]) -> int:
    """Bytes of a training step, without gradients of weights; slices of heads are small, as the model is."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=8, attention_head_dim=32, num_layers=8, ffn_dim=1024, text_dim=64, freq_dim=64
    )
    inputs = torch.randn(1, 16, 4, 32, 32), torch.full((1,), 500.0), torch.randn(1, 16, 64)  # 1,024 tokens
    if degrees:
        apply_context_parallel(model, ContextParallelConfig(**degrees))  # type: ignore[arg-type]

    def step() -> None:
        model(*inputs, return_dict=False)[0].square().mean().backward()
        model.zero_grad(set_to_none=False)

    with mock.patch.dict(gathered.SLICE_BYTES, cpu=256 << 10):
        return _peak_beside_weights(step, model)


def _peak_beside_weights(step: Callable[[], None], model: nn.Module) -> int:
    """Their gradients are there already, but for the one that is being computed, of the largest at most."""
    step()
    return read_trace(record_trace(step)).peak_bytes - max(x.nbytes for x in model.parameters())


@pytest.mark.parametrize(("world", "mode"), [(2, "ring_degree"), (4, "ulysses_degree")])
@pytest.mark.full
def test_a_models_training_step_allocates_its_share(run_ranks: RankPool, world: int, mode: str) -> None:
    """Although every rank embeds all patches and computes the whole loss."""
    alone = max(run_ranks(1, _step_peak, {}))
    for peak in run_ranks(world, _step_peak, {mode: world}):
        assert peak <= 1.1 * alone / world
