"""The Triton kernel of the merge in Triton's interpreter, against float64. It needs no GPU, but the package triton.

`.ci/triton`, a step of `.ci/run`, runs it with the package.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

# The interpreter must be chosen before Triton is imported, so the comparison runs in a separate process.
COMPARISON = """
import contextlib
import itertools
import torch
from lightning_cp.attention.merge_triton import block_shape, merge_in_place
from lightning_cp.kernels import PartialAttention

torch.cuda.device = lambda device: contextlib.nullcontext()
generator = torch.Generator().manual_seed(0)


def stored(x, order, gap):
    # The same values with the dims in another order in memory, and with a gap after each element of the last one.
    memory = x.permute(order).unsqueeze(-1).repeat_interleave(1 + gap, -1).contiguous()
    return memory[..., 0].permute([order.index(i) for i in range(x.ndim)])


def exact_merge(a, b):
    weights = torch.stack([a.lse, b.lse]).double().softmax(0).nan_to_num(0.0).unsqueeze(-1)  # NaN: no keys in both
    out = weights[0] * a.out.double() + weights[1] * b.out.double()
    return out, torch.logaddexp(a.lse.double(), b.lse.double())


LAYOUTS = {  # order of the dims in memory of out and lse, of both parts, and elements between two of a row
    "by token": ((0, 1, 2, 3), (0, 1, 2), 0),
    "by head": ((0, 2, 1, 3), (0, 2, 1), 0),
    "lse by head": ((0, 1, 2, 3), (0, 2, 1), 0),
    "sequence first": ((1, 0, 2, 3), (1, 0, 2), 0),
    "with gaps": ((0, 2, 3, 1), (2, 1, 0), 2),
}
tokens_of_block = block_shape(64)["tokens_per_program"]
SHAPES = [  # b, s, h, d: blocks that are full, begun, exceeded by one token; head dims that are no power of 2; empty
    (1, tokens_of_block, 2, 64),
    (1, tokens_of_block + 1, 2, 64),
    (2, 5, 3, 20),
    (3, 7, 1, 45),
    (1, 1, 1, 1),
    (1, 17, 2, 128),
    (1, 9, 1, 256),
    (1, 3, 1, 2176),
    (1, 0, 2, 8),
    (0, 4, 2, 8),
]
for shape, dtype, (name, layout) in itertools.product(
    SHAPES, (torch.float32, torch.bfloat16, torch.float16), LAYOUTS.items()
):
    out_order, lse_order, gap = layout
    outs = [torch.randn(shape, generator=generator) for _ in range(2)]
    lses = [torch.randn(shape[:3], generator=generator) * scale for scale in (30.0, 1.0)]  # one outweighs the other
    for number, rows in enumerate((slice(0, None, 4), slice(1, None, 4))):  # rows without keys in a, in b, in both
        for x, y in ((outs[number], lses[number]), *([(outs[1], lses[1])] if number == 0 else [])):
            at = rows if (x is outs[number]) else slice(0, None, 8)
            x[:, at], y[:, at] = 0.0, float("-inf")
    a, b = (
        PartialAttention(stored(x.to(kind), out_order, gap), stored(y, lse_order, gap))
        for x, y, kind in zip(outs, lses, (torch.float32, dtype))
    )
    out, lse = exact_merge(a, b)
    before = [x.clone() for x in b]
    merged = merge_in_place(a, b)
    case = f"{shape}, {dtype}, {name}"
    assert merged.out.data_ptr() == a.out.data_ptr() and merged.lse.data_ptr() == a.lse.data_ptr(), case
    assert torch.equal(b.out, before[0]) and torch.equal(b.lse, before[1]), f"{case}: the second part has changed"
    assert torch.equal(merged.lse.isinf(), lse.isinf()), case
    torch.testing.assert_close(merged.out.double(), out, rtol=1e-6, atol=2e-6, msg=lambda text: f"{case}: {text}")
    torch.testing.assert_close(merged.lse.double(), lse, rtol=1e-6, atol=2e-6, msg=lambda text: f"{case}: {text}")

# Elements between and around those of a view must not be written.
memory = torch.full((1, 6, 3, 40), 7.0)
part = PartialAttention(memory[:, 1:5, 1:2, 8:28], torch.zeros(1, 4, 1))
merge_in_place(part, PartialAttention(torch.ones(1, 4, 1, 20), torch.zeros(1, 4, 1)))
assert (memory == 7.0).sum() == memory.numel() - 80
assert (memory[:, 1:5, 1:2, 8:28] == 4.0).all()
print("compared")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
def test_the_kernel_merges_as_exactly_as_float32_can() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", COMPARISON]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("compared\n")
