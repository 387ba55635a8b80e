"""Flex attention's operators, as sparse masks use them, become Triton code for a GPU that is not here."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_cp.attention.sparse import flex

pytest.importorskip("triton", reason="needs the package triton")

HOPPER = SimpleNamespace(
    name="H100",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    total_memory=80 << 30,
    warp_size=32,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
SUPPORT = {  # of the device interface of the compiler
    "is_available": True,
    "current_device": 0,
    "get_compute_capability": 90,
    "get_device_properties": HOPPER,
    "is_triton_capable": True,
    "raise_if_triton_unavailable": None,
    "is_dtype_supported": True,
    "is_bf16_supported": True,
}


def _on_a_gpu(stack: ExitStack) -> None:
    """Let the compiler believe that there is an H100."""
    from torch._dynamo.device_interface import CudaInterface, register_interface_for_device

    for target in (torch.cuda, CudaInterface, CudaInterface.Worker):
        for name, value in {**SUPPORT, "get_device_capability": (9, 0), "device_count": 1}.items():
            if hasattr(target, name):
                stack.enter_context(mock.patch.object(target, name, staticmethod(lambda *_, x=value, **__: x)))
    stack.enter_context(mock.patch("torch.utils._triton.triton_hash_with_backend", return_value="none"))
    stack.enter_context(mock.patch("torch._inductor.config.compile_threads", 1))
    register_interface_for_device("cuda", CudaInterface)


def _code(function: Any, arguments: list[Tensor], mode: FakeTensorMode) -> str:
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    with torch.no_grad():
        graph = make_fx(function, decomposition_table=select_decomp_table())(*arguments)
    lowering = GraphLowering(graph)
    with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowering.run(*arguments)
        code, _ = lowering.codegen()
    return str(getattr(code, "value", code))


@pytest.mark.parametrize("with_lse", [False, True])
def test_operators_become_triton_code(with_lse: bool) -> None:
    with ExitStack() as stack:
        _on_a_gpu(stack)
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(*shape, device="cuda", dtype=dtype)

        def lists(rows: int, columns: int) -> list[Tensor]:
            return [empty(1, 1, rows, dtype=torch.int32), empty(1, 1, rows, columns, dtype=torch.int32)] * 2

        q, grad, k, v = (empty(1, 2, n, 64) for n in (1100, 1100, 533, 533))
        lse, index, bits = empty(1, 2, 1100, dtype=torch.float32), lists(9, 5)[1], empty(11, 128, 128, dtype=torch.bool)
        mask = [*lists(9, 5), *lists(5, 9), index, bits]
        forward = _code(lambda q, k, v, *x: flex._forward(q, k, v, 0.125, x[:8], *x[8:]), [q, k, v, *mask], mode)
        given = [q, k, v, q.clone(), lse, grad, *([lse.clone()] if with_lse else [])]

        def run_backward(*x: Tensor) -> Any:
            grad_lse, rest = (x[6], x[7:]) if with_lse else (None, x[6:])
            return flex._backward(*x[:6], grad_lse, 0.125, rest[:8], *rest[8:])

        backward = _code(run_backward, [*given, *mask], mode)
    assert forward.count("tl.dot(") >= 2
    assert backward.count("tl.dot(") >= 5  # scores, dP and dq for queries; scores, dv, dP and dk for keys
    for code in (forward, backward):
        assert "16384*" in code, "a mask of 128 x 128 is read in partial tiles"
