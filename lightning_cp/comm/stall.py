"""A collective that does not end, told before its time-out: which ranks wait where, and what the others do instead.

Two threads in each rank. One looks at the rank's own stack: in which collective and module it is, and for how long
without moving. The other leaves that in a store which all ranks read, and may hang where the network does.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_cp.comm import channel
from lightning_cp.comm.loopback import host_store
from lightning_cp.comm.stack_location import BACKWARD, StackLocation, locate_stack, name_of_collective
from lightning_cp.comm.stats import STATS
from lightning_cp.mesh import moves_cuda_by

_PATIENCE = timedelta(seconds=10)  # with the store


@dataclass
class Status:
    """A rank's word about itself. `beat` grows with each."""

    place: StackLocation
    for_s: float
    waits: bool
    beat: int = 0
    heard_at: float = field(default_factory=time.monotonic)  # by the reader's clock

    def to_text(self) -> str:
        """For the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes) -> Status:
        """What `to_text` told, heard now."""
        fields = json.loads(text)
        return cls(StackLocation(**fields["place"]), fields["for_s"], fields["waits"], fields["beat"])


class _WatchThread(threading.Thread):
    """Can be ended from outside, as Lightning's test suite does with daemon threads that it finds."""

    def __init__(self, ended: threading.Event, job: Callable[..., None], args: tuple[object, ...]) -> None:
        super().__init__(target=job, args=args, name="lightning_cp_stall_watch", daemon=True)
        self._watch_ended = ended

    def stop(self) -> None:
        """Ends the watch, and waits for this thread: `_PATIENCE` at the longest, where the network hangs."""
        self._watch_ended.set()
        self.join(_PATIENCE.total_seconds())


class StallWatch:
    """Tells once for each stall, on every rank that waits and on the first.

    Args:
        rank, world: of this process.
        after_s: how long a rank may stay in one collective without moving.
        timeout_s: after which collectives fail by themselves, for the message.
        store: of all ranks, and of the watch alone; None: this rank only knows of itself.
        tell: gets the message; None: it is printed on the terminal of our launcher, else to stderr.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        after_s: float,
        timeout_s: float,
        store: TCPStore | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._rank, self._world, self._store = rank, world, store
        self._after_s, self._timeout_s = after_s, timeout_s
        self._tell = tell or self._warn
        self._tick_s = min(10.0, after_s / 4)
        self._ended = threading.Event()
        # With NCCL the host runs on from a collective, until it needs what the GPU has not done.
        self._gpu = torch.cuda.current_device() if moves_cuda_by("nccl") else None
        self._own = Status(StackLocation("starting"), 0.0, waits=False)
        self._peers: dict[int, Status] = {}
        self._threads: list[_WatchThread] = []

    def start(self) -> None:
        """Begins to watch the thread that calls this."""
        watched = threading.get_ident()
        jobs = [(self._observe, (watched,))] + ([(self._exchange, ())] if self._store is not None else [])
        self._threads = [_WatchThread(self._ended, job, args) for job, args in jobs]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends it and its threads: one that is still in the store when Python ends would abort the process."""
        self._ended.set()
        for thread in self._threads:
            thread.stop()

    def _observe(self, watched: int) -> None:
        seen: Hashable = None
        since, told = time.monotonic(), False
        while not self._ended.wait(self._tick_s) and dist.is_initialized():
            frame = _waiting_frame(watched)
            if frame is None:
                break
            place = locate_stack(frame, STATS.describe_module())
            now = (id(frame), frame.f_lasti, STATS.collectives, self._worked(watched))
            del frame  # and what its locals hold
            if now != seen:
                seen, since = now, time.monotonic()
            for_s, before = time.monotonic() - since, self._own
            waits = for_s >= self._after_s and (bool(place.collective) or self._gpu_is_busy())
            self._own = Status(place, for_s, waits, before.beat + 1)
            # One tick after it began to wait, so that the others' words of it are here.
            stalls = before.waits if waits else self._rank == 0 and any(x.waits for x in self._fresh().values())
            if stalls and not told:
                self._tell(self._message())
            told = stalls
        self._ended.set()

    def _warn(self, message: str) -> None:
        """Print on the terminal of the launcher, which may differ from this rank's stderr, and in this rank's log."""
        warning = {"kind": "stall", "text": message, "after_s": self._after_s}
        if not channel.send(warning, patience_s=1) or self._rank > 0:
            print(message, file=sys.stderr, flush=True)

    def _worked(self, watched: int) -> int:
        """Grows while the thread computes: frames of a loop are often found at one address, at one instruction."""
        if self._gpu is not None or not hasattr(time, "pthread_getcpuclockid"):
            return 0
        return int(time.clock_gettime(time.pthread_getcpuclockid(watched)) / (0.02 * self._tick_s))

    def _gpu_is_busy(self) -> bool:
        """Asked only of a host that has not moved for long, so never while it captures a CUDA graph."""
        return self._gpu is not None and not torch.cuda.default_stream(self._gpu).query()

    def _exchange(self) -> None:
        assert self._store is not None, "only started with one"
        names = [str(rank) for rank in range(self._world)]
        while not self._ended.wait(self._tick_s):
            try:
                self._store.set(str(self._rank), self._own.to_text())
                for rank, data in enumerate(self._store.multi_get(names)):
                    status = Status.from_text(data) if data else None
                    known = self._peers.get(rank)
                    if status is not None and (known is None or known.beat != status.beat):
                        self._peers[rank] = status
            except (RuntimeError, ValueError):  # the store's host is gone or out of reach: it will be said who is
                continue

    def _fresh(self) -> dict[int, Status]:
        now = time.monotonic()
        peers = dict(self._peers)  # the other thread adds to it
        return {rank: x for rank, x in peers.items() if now - x.heard_at < 4 * self._tick_s}

    def _message(self) -> str:
        known = {**self._fresh(), self._rank: self._own}
        waiting: dict[str, list[int]] = {}
        elsewhere: dict[str, list[int]] = {}
        for rank, status in sorted(known.items()):
            (waiting if status.waits else elsewhere).setdefault(status.place.describe(), []).append(rank)
        longest = max((x.for_s for x in known.values() if x.waits), default=0.0)
        lines = [
            f"warning: a collective has not ended for {longest:.0f} s (time-out: {self._timeout_s:.0f} s)",
            *(f"{_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} {where}" for where, ranks in waiting.items()),
            *(f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {where}" for where, ranks in elsewhere.items()),
        ]
        silent = [rank for rank in range(self._world) if rank not in known]
        if silent:
            lines.append(f"{_ranks(silent)} cannot be heard: gone, hanging as a whole, or cut off from here")
        return "\n  ".join(lines)


def watch_stalls(
    *, host: str, after_s: float, timeout_s: float, tell: Callable[[str], None] | None = None
) -> StallWatch | None:
    """Starts this process' watch, in the place of an earlier one; None where the world is one rank.

    Args:
        host: an address of the first rank that all ranks can reach.
        after_s, timeout_s, tell: see `StallWatch`.
    Ranks: the whole world.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return None
    store, port = None, [0]
    if rank == 0:
        store = host_store(host, timeout=_PATIENCE)
        for each in range(world):
            store.set(str(each), "")
        port = [store.port]
    dist.broadcast_object_list(port, src=0)
    if store is None:
        try:
            store = TCPStore(host, port[0], is_master=False, wait_for_workers=False, timeout=_PATIENCE)
        except RuntimeError:  # a firewall: this rank will tell of itself alone
            store = None
    dist.all_gather_object([False] * world, True)  # the first rank may end at once, and its store with it
    stop_watch()
    global _watch
    _watch = StallWatch(rank, world, after_s=after_s, timeout_s=timeout_s, store=store, tell=tell)
    STATS.wanted = True
    _watch.start()
    return _watch


def stop_watch() -> None:
    """Ends this process' watch, where there is one: before its process group is destroyed, and before Python ends."""
    global _watch
    if _watch is not None:
        _watch.stop()
    _watch, STATS.wanted = None, False


_watch: StallWatch | None = None
atexit.register(stop_watch)


def _waiting_frame(watched: int) -> FrameType | None:
    """The innermost frame of the watched thread, or of one that runs backward for it and is in a collective."""
    frames = sys._current_frames()
    main = frames.pop(watched, None)
    frames.pop(threading.get_ident(), None)
    if main is None or name_of_collective(main):
        return main
    if main.f_code.co_name == BACKWARD:
        return next((frame for frame in frames.values() if name_of_collective(frame)), main)
    return main


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
