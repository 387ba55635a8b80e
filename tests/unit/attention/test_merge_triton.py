"""The Triton kernel of the merge, in Triton's interpreter: it needs no GPU, but the package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

TRIED = """
import contextlib
import torch
from lightning_cp.attention.merge import merge
from lightning_cp.attention.merge_triton import merge_in_place
from lightning_cp.kernels import PartialAttention

torch.cuda.device = lambda x: contextlib.nullcontext()
for shape in ((2, 5, 3, 20), (1, 33, 4, 64), (1, 1, 1, 8), (1, 0, 2, 8)):
    for dtype in (torch.float32, torch.bfloat16):
        parts = [PartialAttention(torch.randn(shape).to(dtype), torch.randn(shape[:3]) * 5) for _ in range(2)]
        a, b = PartialAttention(parts[0].out.float(), parts[0].lse), parts[1]
        for part, rows in ((a, (slice(None), slice(0, 1))), (b, (slice(None), slice(None), slice(0, 1)))):
            part.out[rows], part.lse[rows] = 0, float("-inf")
        by_head = PartialAttention(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in a))
        expected = merge(a, b)
        found = merge_in_place(by_head, b)
        assert found.out.data_ptr() == by_head.out.data_ptr()
        torch.testing.assert_close(found.out, expected.out)
        torch.testing.assert_close(found.lse, expected.lse)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
def test_the_kernel_is_the_merge() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", TRIED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
