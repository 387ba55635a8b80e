"""Report a stalled collective before its time-out: what this rank waits for.

A thread reads the rank's stack: the collective and module that the rank is in, and how long it has not moved. It sends
that to the launcher of this package, which prints what all ranks do. Without one, each rank that waits prints it.
"""

from __future__ import annotations

import atexit
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn

from lightning_cp.comm.background import wait_for_gathers
from lightning_cp.comm.stats import STATS
from lightning_cp.launch import channel
from lightning_cp.launch.cause import RankStatus, describe_stall
from lightning_cp.mesh.groups import cuda_backend_is

_COMM_DIR = str(Path(__file__).parents[1] / "comm")
_TORCH_DIRS = (str(Path(dist.__file__).parent), str(Path(nn.parallel.__file__).parent))
_PACKAGE_DIR, _STDLIB_DIR = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")
BACKWARD = "_engine_run_backward"  # torch function that runs backward in C++; DDP and FSDP average gradients inside it
_WRAPPERS = ("wrapper", "inner", "_call_impl", "_wrapped_call_impl")
_OTHERS = "a rank without such a warning has not joined: it is elsewhere, has exited, is frozen or cannot be reached"
_GATHERS_S = 5.0  # wait for background gathers; other ranks may have failed


@dataclass(frozen=True)
class StackLocation:
    """Source line (of the user's code if the thread is in a collective), module and collective of a thread."""

    line: str
    module: str = ""
    collective: str = ""

    def describe(self) -> str:
        """Return the text that follows "rank 1 is" or "rank 1 waits" in a message."""
        module = f", {self.module}" if self.module else ""
        if self.collective:
            return f"in {self.collective}{module} ({self.line})"
        return f"in no collective{module} ({self.line})"


def locate_stack(frame: FrameType, module: str) -> StackLocation:
    """Return the location of a thread.

    Only code objects and line numbers are read: reading `f_locals` of a frame that runs in another thread ends the
    process (SIGSEGV).

    Args:
        frame: its innermost frame.
        module: description of the last module it entered.
    """
    collective = _collective_of(frame)
    at = next((outer for outer in _frames_outward(frame) if collective and _is_user_code(outer)), frame)
    line = f"{'/'.join(Path(at.f_code.co_filename).parts[-2:])}:{at.f_lineno} in {at.f_code.co_name}"
    return StackLocation(line, module, collective)


def _collective_of(frame: FrameType) -> str:
    name = name_of_collective(frame)
    backward = any(outer.f_code.co_name == BACKWARD for outer in _frames_outward(frame))
    if not name and frame.f_code.co_name == BACKWARD:
        return "backward, where gradients are averaged"
    return f"{name} in backward" if name and backward else name


def name_of_collective(frame: FrameType) -> str:
    """Return the `torch.distributed` function in progress and the function here that called it; "" if there is none."""
    torch_name = comm_name = ""
    for outer in _frames_outward(frame):
        file, name = outer.f_code.co_filename, outer.f_code.co_name
        if file.startswith(_COMM_DIR):
            comm_name = outer.f_code.co_qualname
        elif file.startswith(_TORCH_DIRS) and not comm_name:
            torch_name = torch_name if name in _WRAPPERS else name
        else:
            break
    return f"{comm_name} ({torch_name})" if comm_name and torch_name else comm_name or torch_name


def _is_user_code(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((_PACKAGE_DIR, _STDLIB_DIR, "<")) and "site-packages" not in file


def _frames_outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


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
