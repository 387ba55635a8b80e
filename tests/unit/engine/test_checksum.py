"""A checksum depends on every bit and its place, and on nothing else."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.engine.peers.checksum import checksum

KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", [*KINDS, torch.float8_e4m3fn], ids=str)
def test_equal_values_have_equal_checksums_whatever_their_strides(dtype: torch.dtype) -> None:
    x = (torch.arange(30).view(6, 5) % 7 // 2 % 3).to(dtype)
    assert checksum(x) == checksum(x.clone()) == checksum(x.t().contiguous().t())
    assert checksum(x) != checksum(x.t())


def test_one_bit_anywhere_changes_it() -> None:
    x = torch.randn(1 << 20, dtype=torch.float32)
    x = torch.cat([x, x])  # two chunks
    sums = {checksum(x)}
    for place in (0, 1, (1 << 20) - 1, 1 << 20, x.numel() - 1):
        other = x.clone()
        other.view(torch.int32)[place] ^= 1
        sums.add(checksum(other))
    assert len(sums) == 6


def test_constants_and_exchanged_rows_differ() -> None:
    """A sum that is linear in the bits is equal for zeros and ones at 2^22 elements."""
    assert len({checksum(torch.full((1 << 22,), value)) for value in (0.0, 1.0, 2.0, float("nan"))}) == 4
    x = torch.randn(2, 8)
    assert checksum(x) != checksum(x.flip(0))
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(torch.zeros(0)) == 0
