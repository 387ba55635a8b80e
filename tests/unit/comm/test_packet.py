"""Several tensors in one buffer, and buffers that wait for the next call."""

from __future__ import annotations

import torch

from lightning_cp.comm.packet import Buffers, Piece, layout_of, pack_tensors, packet_bytes, unpack_tensors


def test_what_is_packed_is_unpacked() -> None:
    tensors = [
        torch.randn(2, 3, 5).transpose(0, 2),
        torch.rand(3, 3) > 0.5,
        torch.randn(7, dtype=torch.float64),
        torch.randn(0, 4),
        torch.randn(1, 3, dtype=torch.bfloat16).expand(5, 3),
        torch.tensor(3, dtype=torch.int64),
    ]
    layout = layout_of(tensors)
    buffer = pack_tensors(tensors)
    assert buffer.numel() == packet_bytes(layout)
    for mine, theirs in zip(unpack_tensors(buffer, layout), tensors, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.is_contiguous()
        assert torch.equal(mine, theirs)


def test_pieces_are_views_that_start_at_multiples_of_16() -> None:
    layout = [Piece((3,), torch.bool), Piece((2, 3), torch.float32), Piece((1,), torch.float64)]
    assert packet_bytes(layout) == 16 + 32 + 16
    buffer = torch.zeros(64, dtype=torch.uint8)
    flags, floats, doubles = unpack_tensors(buffer, layout)
    floats.fill_(1)
    assert int(buffer.count_nonzero()) == 6 * 2  # 1.0 has two bytes that are not zero
    assert not flags.any()
    assert not doubles.any()
    assert [x.storage_offset() * x.element_size() for x in (flags, floats, doubles)] == [0, 16, 48]


def test_a_given_buffer_is_used() -> None:
    buffer = torch.zeros(16, dtype=torch.uint8)
    assert pack_tensors([torch.ones(4)], out=buffer) is buffer
    assert torch.equal(buffer.view(torch.float32), torch.ones(4))


def test_an_empty_packet_has_no_bytes() -> None:
    assert packet_bytes([Piece((2, 0, 4), torch.float32)]) == 0
    assert pack_tensors([torch.empty(2, 0, 4)]).numel() == 0


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
