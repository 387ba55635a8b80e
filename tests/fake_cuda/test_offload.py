"""On a GPU, the inputs of checkpointed blocks leave and return on a separate stream, and the host waits for none."""

from __future__ import annotations

import weakref

import torch

from lightning_cp.compat.torch_names import address_of
from lightning_cp.engine.recompute import OffloadCheckpoint, _Inputs
from tests.fake_cuda.test_host_weights import StreamOfMemory, on_streams


def test_the_kernels_wait_for_the_copies_of_their_block_only() -> None:
    with on_streams() as (streams, crossings):
        side, before = OffloadCheckpoint()._side, None
        blocks: list[_Inputs] = []
        with StreamOfMemory(streams) as memory:
            for i in range(3):
                x = torch.empty(4, 4, device="cuda")
                found = _Inputs({address_of(x.untyped_storage())}, before or (lambda: None), side)
                before = weakref.ref(found)
                blocks.append(found)
                assert found.pack(x) == 0
                streams.events.append(f"runs {i}")
                reference = weakref.ref(x)
                del x
                assert reference() is not None, "its memory is in use until it is copied"
                found.release()
                assert reference() is None
            forward, streams.events = streams.events, []
            for i in (2, 1):
                x = blocks.pop().unpack(0)
                assert x.device.type == "cuda"
                streams.events.append(f"runs {i} again")
            left, streams.events = streams.events, []
            blocks.clear()  # as if backward ended here
        assert crossings.waits == []
        assert memory.copied == [True] * 6
        assert not any(memory.allocated), "memory of the side stream could not be used again before the GPU is done"
    assert forward == [
        event for i in range(3) for event in ("side waits", f"copied {i + 1}", f"runs {i}", f"waits for {i + 1}")
    ]
    assert left == [
        *("side waits", "copied 4", "waits for 4", "side waits", "copied 5", "runs 2 again"),
        *("waits for 5", "side waits", "copied 6", "runs 1 again"),
    ]
    assert streams.events == ["waits for 6"], "before other kernels get the memory"
