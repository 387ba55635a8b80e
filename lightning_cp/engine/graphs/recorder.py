"""Record a forward once and repeat it: CUDA graphs, behind a protocol that tests implement on CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_cp.compat.torch_names import end_allocation_to_pool


@dataclass(eq=False)
class Recording:
    """A recorded forward.

    Attributes:
        output: result of the forward. Its tensors are written anew by each replay.
        replay: computes the forward again, from the values that its input tensors have then.
        free: frees the memory of the recording.
        num_bytes: memory that it takes, in addition to that of earlier recordings of this recorder.
    """

    output: Any
    replay: Callable[[], None]
    free: Callable[[], None]
    num_bytes: int


class Timing(Protocol):
    """The measured time of one forward."""

    def host_share(self) -> float | None:
        """Return the time that the host needed over the time until the GPU had finished; None: the GPU still computes.

        The host does not wait for the GPU.
        """


class GraphRecorder(Protocol):
    """Records forwards on one device. All recordings of a recorder run one after another, and share memory."""

    device: torch.device
    total_bytes: int

    def capture(self, run: Callable[[], Any]) -> Recording:
        """Record `run`, which reads and writes tensors on `device` only. Raises: Exception: it cannot be recorded."""

    def timed(self, run: Callable[[], Any]) -> tuple[Any, Timing]:
        """Call `run`. Returns: its result, and its time."""

    def stream(self) -> int:
        """Return an ID of the stream on which forwards are computed now."""


class CudaGraphs:
    """Records forwards as CUDA graphs with one memory pool.

    Attributes:
        device: a CUDA device.
        total_bytes: memory of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total_bytes = torch.cuda.get_device_properties(device).total_memory
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def capture(self, run: Callable[[], Any]) -> Recording:
        """Capture `run` in a graph. It must have run before, so that kernels are compiled and ranks are connected."""
        before, graph, stream = self._pool_bytes(), torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        keeps_casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # the graph would read casts of weights that are freed after autocast
        # thread_local: the threads of NCCL's watchdog and of the stall watch may query events at the same time.
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = run()
        except BaseException:
            self._clean_up(graph, stream)
            raise
        finally:
            torch.set_autocast_cache_enabled(keeps_casts)
        return Recording(output, graph.replay, graph.reset, self._pool_bytes() - before)

    def _clean_up(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        """Undo what torch (2.11 to 2.14) leaves after a capture that CUDA has ended with an error.

        Until then the current stream is that of the capture, allocations may go to the pool of the graph, and random
        numbers cannot be drawn.
        """
        torch.cuda.set_stream(stream)
        self._failed.append(graph)  # the allocator of pinned memory keeps a pointer to it
        with suppress(RuntimeError):  # a capture that ended, with an error of Python
            end_allocation_to_pool(self.device.index, self._pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros((), device=self.device)  # the end of this capture is the end for the random generator, too

    def timed(self, run: Callable[[], Any]) -> tuple[Any, Timing]:
        """Call `run` between two events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        started = time.perf_counter()
        result = run()
        host_s = time.perf_counter() - started
        end.record()
        return result, _CudaTiming(begin, end, host_s)

    def stream(self) -> int:
        """Return the handle of the current stream."""
        handle: int = torch.cuda.current_stream(self.device).cuda_stream
        return handle

    def _pool_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(self._pool))


@dataclass(frozen=True)
class _CudaTiming:
    begin: torch.cuda.Event
    end: torch.cuda.Event
    host_s: float

    def host_share(self) -> float | None:
        if not self.end.query():  # type: ignore[no-untyped-call]
            return None
        elapsed_ms: float = self.begin.elapsed_time(self.end)
        return 1e3 * self.host_s / max(elapsed_ms, 1e-3)


def recorder_for(device: torch.device) -> GraphRecorder | None:
    """Return a new recorder for a device; None if forwards on it cannot be recorded."""
    return CudaGraphs(device) if device.type == "cuda" else None
