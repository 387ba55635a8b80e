"""Report a stalled collective before its time-out: what this rank waits for.

A thread reads the rank's stack: the collective and module that the rank is in, and how long it has not moved. It sends
that to the launcher of this package, which prints what all ranks do. Without one, each rank that waits prints it.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from types import FrameType

import torch
import torch.distributed as dist

from lightning_cp.comm.background import wait_for_gathers
from lightning_cp.comm.stats import STATS
from lightning_cp.launch import channel
from lightning_cp.launch.stack_location import BACKWARD, locate_stack, name_of_collective
from lightning_cp.launch.stalls import RankStatus, describe_stall
from lightning_cp.mesh.groups import cuda_backend_is

_OTHERS = "a rank without such a warning has not joined: it is elsewhere, has exited, is frozen or cannot be reached"
_GATHERS_S = 5.0  # wait for background gathers; other ranks may have failed


class _WatchThread(threading.Thread):
    """Daemon thread with a `stop` method, which Lightning's test suite calls on daemon threads that it finds."""

    def __init__(self, ended: threading.Event, job: Callable[[], None]) -> None:
        super().__init__(target=job, name="lightning_cp_stall_watch", daemon=True)
        self._watch_ended = ended

    def stop(self) -> None:
        """End the watch and wait for this thread."""
        self._watch_ended.set()
        self.join()


class StallWatch:
    """Watch of this process: it reports each stall once.

    Args:
        rank: global rank of this process.
        after_s: seconds without progress in one collective after which a rank counts as waiting.
        timeout_s: time-out of collectives in seconds, printed in the message.
        report: callback for the message if this process has no launcher to send to; default: print it to stderr.
    """

    def __init__(
        self, rank: int, *, after_s: float, timeout_s: float, report: Callable[[str], None] | None = None
    ) -> None:
        self._rank, self._after_s, self._timeout_s = rank, after_s, timeout_s
        self._report = report or _print
        self._tick_s = min(10.0, after_s / 4)
        self._ended = threading.Event()
        # With NCCL a collective returns at once on the host, which blocks later, when it needs a GPU result.
        self._gpu = torch.cuda.current_device() if cuda_backend_is("nccl") else None
        self._status, self._beats = RankStatus("starting", 0.0, waits=False), 0
        self._thread: _WatchThread | None = None
        self._thread_id, self._thread_lock = threading.get_ident(), threading.Lock()
        self.users, self.world_group = 1, weakref.ref(dist.group.WORLD)

    def start(self) -> None:
        """Start to watch the calling thread."""
        self._thread_id = threading.get_ident()
        self._thread = _WatchThread(self._ended, self._observe)
        self._thread.start()

    def stop(self) -> None:
        """Stop the watch."""
        if self._thread is not None:
            self._thread.stop()

    @contextmanager
    def watching_this_thread(self) -> Iterator[None]:
        """Watch the calling thread in place of the one before, which is watched again afterwards."""
        before, self._thread_id = self._thread_id, threading.get_ident()
        try:
            yield
        finally:
            with self._thread_lock:  # this thread must not end while it is read
                self._thread_id = before

    def _observe(self) -> None:
        seen: Hashable = None
        since, is_reported = time.monotonic(), False
        while not self._ended.wait(self._tick_s) and dist.is_initialized():
            with self._thread_lock:
                frame = _waiting_frame(self._thread_id)
                if frame is None:
                    break
                location = locate_stack(frame, STATS.describe_module())
                now = (id(frame), frame.f_lasti, STATS.collectives, self._cpu_time_count(self._thread_id))
                del frame  # it keeps its local variables alive
            if now != seen:
                seen, since = now, time.monotonic()
            unchanged_s = time.monotonic() - since
            waits = unchanged_s >= self._after_s and (bool(location.collective) or self._gpu_is_busy())
            self._status = RankStatus(location.describe(), unchanged_s, waits)
            message = {"kind": "stall", **asdict(self._status), "tick_s": self._tick_s, "timeout_s": self._timeout_s}
            if not channel.send(message, timeout_s=1) and waits and not is_reported:
                self._report(describe_stall({self._rank: self._status}, self._timeout_s, [_OTHERS]))
            is_reported = waits
            self._beats += 1
        self._ended.set()

    def _cpu_time_count(self, thread_id: int) -> int:
        """Return a counter that grows with the thread's CPU time; 0 with NCCL, or if it cannot be measured.

        Frame and instruction are not enough: a long backward has one, and frames of a loop often have the same address.
        """
        if self._gpu is not None or not hasattr(time, "pthread_getcpuclockid"):
            return 0
        return int(time.clock_gettime(time.pthread_getcpuclockid(thread_id)) / (0.002 * self._tick_s))

    def _gpu_is_busy(self) -> bool:
        """Return True if the GPU has unfinished work.

        Only called after the host has not moved for `after_s`, so never during the capture of a CUDA graph.
        """
        return self._gpu is not None and not torch.cuda.default_stream(self._gpu).query()


def watch_stalls(*, after_s: float, timeout_s: float, report: Callable[[str], None] | None = None) -> StallWatch | None:
    """Start the watch of this process, which replaces an earlier one. Returns: the watch; None if the world size is 1.

    Args: after_s, timeout_s, report: see `StallWatch`; at most half the time-out is waited.
    """
    if dist.get_world_size() == 1:
        return None
    stop_watch()
    global _watch
    _watch = StallWatch(dist.get_rank(), after_s=min(after_s, timeout_s / 2), timeout_s=timeout_s, report=report)
    STATS.records_modules = True
    _watch.start()
    return _watch


def stop_watch() -> None:
    """Stop the watch of this process, if any: before its process group is destroyed, and before Python exits."""
    global _watch
    if _watch is not None:
        _watch.stop()
    _watch, STATS.records_modules = None, False


def leave_process_group() -> None:
    """End this rank's watch and background gathers, then destroy its process groups, so that it can join others."""
    stop_watch()
    wait_for_gathers(within_s=_GATHERS_S)
    dist.destroy_process_group()


def current_watch() -> StallWatch | None:
    """Return the watch of this process; None if it has none for its current process group."""
    return _watch if _watch is not None and _watch.world_group() is dist.group.WORLD else None


def watching_this_thread() -> AbstractContextManager[None]:
    """Watch the calling thread within a context, if there is a watch: a service may call from any thread."""
    watch = current_watch()
    return nullcontext() if watch is None else watch.watching_this_thread()


_watch: StallWatch | None = None
atexit.register(stop_watch)


def _waiting_frame(thread_id: int) -> FrameType | None:
    """Return the innermost frame of the watched thread, or of an autograd thread that is in a collective for it."""
    frames = sys._current_frames()
    main = frames.pop(thread_id, None)
    frames.pop(threading.get_ident(), None)
    if main is None or name_of_collective(main):
        return main
    if main.f_code.co_name == BACKWARD:
        return next((frame for frame in frames.values() if name_of_collective(frame)), main)
    return main


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
