"""Report a stalled collective before its time-out: which ranks wait, where, and what the other ranks do.

Two threads run on each rank. One reads the rank's own stack: the collective and module it is in, and how long it has
not moved. The other writes that to a store that all ranks read. They are separate because store requests can hang with
the network.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.comm.stats import STATS
from lightning_cp.launch import channel
from lightning_cp.launch.rendezvous import shared_store
from lightning_cp.launch.stack_location import BACKWARD, StackLocation, locate_stack, name_of_collective
from lightning_cp.mesh.groups import cuda_backend_is

_REQUEST_TIMEOUT = timedelta(seconds=10)  # time-out of a request to the store


@dataclass
class RankStatus:
    """State of one rank, as it reports it. `beat` is incremented with each report."""

    location: StackLocation
    unchanged_s: float
    waits: bool
    beat: int = 0
    received_at: float = field(default_factory=time.monotonic)  # monotonic time on the reading rank

    def to_text(self) -> str:
        """Serialize for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RankStatus:
        """Parse the output of `to_text`; `received_at` is set to the current time."""
        fields = json.loads(text)
        return cls(StackLocation(**fields["location"]), fields["unchanged_s"], fields["waits"], fields["beat"])


class _WatchThread(threading.Thread):
    """Daemon thread with a `stop` method, which Lightning's test suite calls on daemon threads that it finds."""

    def __init__(self, ended: threading.Event, job: Callable[[], None]) -> None:
        super().__init__(target=job, name="lightning_cp_stall_watch", daemon=True)
        self._watch_ended = ended

    def stop(self) -> None:
        """End the watch and wait for this thread, at most `_REQUEST_TIMEOUT` in case the network hangs."""
        self._watch_ended.set()
        self.join(_REQUEST_TIMEOUT.total_seconds())


class StallWatch:
    """Watch that reports each stall once, on every waiting rank and on rank 0.

    Args:
        rank: global rank of this process.
        world: world size.
        after_s: seconds without progress in one collective after which a rank counts as waiting.
        timeout_s: time-out of collectives in seconds, printed in the message.
        store: store shared by all ranks and used only by the watch; None: only this rank is reported.
        report: callback for the message; None: print it on the launcher's terminal, or to stderr without a launcher.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        after_s: float,
        timeout_s: float,
        store: Any = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._rank, self._world, self._store = rank, world, store
        self._after_s, self._timeout_s = after_s, timeout_s
        self._report = report or self._warn
        self._tick_s = min(10.0, after_s / 4)
        self._ended = threading.Event()
        # With NCCL a collective returns at once on the host, which blocks later, when it needs a GPU result.
        self._gpu = torch.cuda.current_device() if cuda_backend_is("nccl") else None
        self._status = RankStatus(StackLocation("starting"), 0.0, waits=False)
        self._peers: dict[int, RankStatus] = {}
        self._threads: list[_WatchThread] = []
        self._thread_id, self._thread_lock = threading.get_ident(), threading.Lock()
        self.users, self.world_group = 1, weakref.ref(dist.group.WORLD)

    def start(self) -> None:
        """Start to watch the calling thread."""
        self._thread_id = threading.get_ident()
        jobs = [self._observe] + ([self._exchange] if self._store is not None else [])
        self._threads = [_WatchThread(self._ended, job) for job in jobs]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads of the watch: a thread in a store request when Python exits would abort the process."""
        self._ended.set()
        for thread in self._threads:
            thread.stop()

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
        since, reported = time.monotonic(), False
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
            unchanged_s, before = time.monotonic() - since, self._status
            waits = unchanged_s >= self._after_s and (bool(location.collective) or self._gpu_is_busy())
            self._status = RankStatus(location, unchanged_s, waits, before.beat + 1)
            # Report one tick after the wait began, so that the statuses of the other ranks have arrived.
            stalls = before.waits if waits else self._rank == 0 and any(x.waits for x in self._recent_peers().values())
            if stalls and not reported:
                self._report(self._message())
            reported = stalls
        self._ended.set()

    def _warn(self, message: str) -> None:
        """Send the message to the launcher's terminal; print it to stderr too on ranks above 0 or if sending fails.

        The launcher's terminal may differ from this rank's stderr, which goes to its log.
        """
        warning = {"kind": "stall", "text": message, "after_s": self._after_s}
        if not channel.send(warning, timeout_s=1) or self._rank > 0:
            print(message, file=sys.stderr, flush=True)

    def _cpu_time_count(self, thread_id: int) -> int:
        """Return a counter that grows with the thread's CPU time; 0 with NCCL, or if it cannot be measured.

        Frame and instruction are not enough: frames of a loop often have the same address and the same instruction.
        """
        if self._gpu is not None or not hasattr(time, "pthread_getcpuclockid"):
            return 0
        return int(time.clock_gettime(time.pthread_getcpuclockid(thread_id)) / (0.002 * self._tick_s))

    def _gpu_is_busy(self) -> bool:
        """Return True if the GPU has unfinished work.

        Only called after the host has not moved for `after_s`, so never during the capture of a CUDA graph.
        """
        return self._gpu is not None and not torch.cuda.default_stream(self._gpu).query()

    def _exchange(self) -> None:
        assert self._store is not None, "the thread is started only with a store"
        names = [str(rank) for rank in range(self._world)]
        while not self._ended.wait(self._tick_s) and dist.is_initialized():
            try:
                self._store.set(str(self._rank), self._status.to_text())
                for rank, text in enumerate(self._store.multi_get(names)):
                    status = RankStatus.from_text(text.decode()) if text else None
                    known = self._peers.get(rank)
                    if status is not None and (known is None or known.beat != status.beat):
                        self._peers[rank] = status
            except (RuntimeError, ValueError):  # no connection to the store: the message lists the missing ranks
                continue

    def _recent_peers(self) -> dict[int, RankStatus]:
        now = time.monotonic()
        peers = dict(self._peers)  # copy: the exchange thread adds entries
        return {rank: x for rank, x in peers.items() if now - x.received_at < 4 * self._tick_s}

    def _message(self) -> str:
        known = {**self._recent_peers(), self._rank: self._status}
        waiting: dict[str, list[int]] = {}
        running: dict[str, list[int]] = {}
        for rank, status in sorted(known.items()):
            (waiting if status.waits else running).setdefault(status.location.describe(), []).append(rank)
        longest = max((x.unchanged_s for x in known.values() if x.waits), default=0.0)
        lines = [
            f"warning: a collective has not ended for {longest:.0f} s (time-out: {self._timeout_s:.0f} s)",
            *(
                f"{_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} {location}"
                for location, ranks in waiting.items()
            ),
            *(
                f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {location}"
                for location, ranks in running.items()
            ),
        ]
        missing = [rank for rank in range(self._world) if rank not in known]
        if missing:
            verb = "has" if len(missing) == 1 else "have"
            lines.append(f"{_ranks(missing)} {verb} no heartbeat: exited, frozen or unreachable")
        return "\n  ".join(lines)


def watch_stalls(
    *, host: str, after_s: float, timeout_s: float, report: Callable[[str], None] | None = None
) -> StallWatch | None:
    """Start the watch of this process, which replaces an earlier one. Returns: the watch; None if the world size is 1.

    Args:
        host: address of rank 0 that all ranks can reach.
        after_s, timeout_s, report: see `StallWatch`; at most half the time-out is waited.
    Ranks: all ranks of the world.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return None
    store = shared_store(host, timeout=_REQUEST_TIMEOUT)
    if store is not None:
        store.set(str(rank), "")
    dist.all_gather_object([False] * world, True)  # barrier: rank 0 may exit right after, and its store with it
    stop_watch()
    global _watch
    after_s = min(after_s, timeout_s / 2)
    _watch = StallWatch(rank, world, after_s=after_s, timeout_s=timeout_s, store=store, report=report)
    STATS.records_modules = True
    _watch.start()
    return _watch


def stop_watch() -> None:
    """Stop the watch of this process, if any: before its process group is destroyed, and before Python exits."""
    global _watch
    if _watch is not None:
        _watch.stop()
    _watch, STATS.records_modules = None, False


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


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
