"""Buffers that wait for the next call."""

from __future__ import annotations

import torch

from lightning_cp.comm.buffers import Buffers

LIKE = torch.zeros(1)


def test_what_was_given_back_is_taken_again_by_size() -> None:
    buffers = Buffers()
    small, large = buffers.take(16, LIKE), buffers.take(32, LIKE)
    assert (small.dtype, small.shape, large.shape) == (torch.uint8, (16,), (32,))
    buffers.give(small, large)
    assert buffers.kept_bytes == 48
    assert buffers.take(32, LIKE) is large
    assert buffers.take(32, LIKE) is not large, "it was taken"
    assert buffers.take(16, LIKE) is small
    assert buffers.kept_bytes == 0


def test_another_device_gets_its_own() -> None:
    buffers = Buffers()
    buffers.give(buffers.take(16, LIKE))
    assert buffers.take(16, torch.zeros(1, device="meta")).device.type == "meta"
    buffers.give(torch.empty(16, dtype=torch.uint8, device="meta"))
    assert buffers.kept_bytes == 16, "only the CPU's allocator forgets"


def test_no_more_than_64_mib_are_kept_and_the_oldest_goes_first() -> None:
    buffers = Buffers()
    first, second = buffers.take(40 << 20, LIKE), buffers.take(30 << 20, LIKE)
    buffers.give(first, second)
    assert buffers.kept_bytes == 30 << 20
    buffers.give(buffers.take(65 << 20, LIKE))
    assert buffers.take(30 << 20, LIKE) is second, "one that is too large drives nothing out"


def test_forgetting_frees_them() -> None:
    buffers = Buffers()
    buffers.give(buffers.take(16, LIKE))
    buffers.forget()
    assert buffers.kept_bytes == 0


def test_one_that_was_made_in_inference_serves_in_training() -> None:
    buffers = Buffers()
    with torch.inference_mode():
        buffers.give(buffers.take(16, LIKE))
    found = buffers.take(16, LIKE)
    assert not found.is_inference()
    found.view(torch.float32).copy_(torch.ones(4, requires_grad=True).detach())
