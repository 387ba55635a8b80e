"""Several tensors in one buffer."""

from __future__ import annotations

import torch

from lightning_cp.comm.packet import Piece, layout_of, pack_tensors, packet_bytes, unpack_tensors


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
