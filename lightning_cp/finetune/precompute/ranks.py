"""Coordinate the ranks that encode a data set."""

from __future__ import annotations

import inspect
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_cp import errors
from lightning_cp.comm.agree import gather_objects
from lightning_cp.compat.torch_names import shared_store
from lightning_cp.launch.rank import was_raised_for_the_user
from lightning_cp.mesh.groups import MeshGroups, cached

_POLL_S = 0.05  # time between two reads of the store while this rank waits
_CHECK_S = 0.5  # time between two reads of the store while this rank works
_REQUEST_TIMEOUT = timedelta(seconds=60)  # time-out of a request to the store
_GIVE_UP_S = 30.0  # longest wait for ranks that do not respond after an error on another rank
# As in `was_raised_for_the_user`.
_BUILTINS: tuple[type[Exception], ...] = (ValueError, TypeError, OSError, FileNotFoundError, MemoryError)
_OURS = (x for x in vars(errors).values() if inspect.isclass(x) and issubclass(x, Exception))
# Exceptions that other ranks raise too, by name.
_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (*_BUILTINS, *_OURS)}


class StoppedElsewhere(Exception):
    """Another rank failed: this rank ends its phase early. `RunState.end` returns the error."""


@dataclass(frozen=True)
class RankError:
    """An exception of one rank, as text. Args: kind: its name in `_KINDS`; None: RuntimeError."""

    rank: int
    kind: str | None
    text: str
    trace: str

    @classmethod
    def of(cls, rank: int, error: Exception) -> RankError:
        """Describe an exception. Classes of other packages become a RuntimeError on the other ranks."""
        name, text = type(error).__name__, str(error)
        is_known = _KINDS.get(name) is type(error) and (was_raised_for_the_user(error) or name == "MemoryError")
        trace = "".join(traceback.format_exception(error))
        return cls(rank, name, text, trace) if is_known else cls(rank, None, f"{name}: {text}", trace)

    def exception(self) -> Exception:
        """Return the exception for the other ranks, with the traceback of the rank that failed."""
        found = _KINDS.get(str(self.kind), RuntimeError)(self.text)
        found.add_note(f"raised on rank {self.rank}:\n{self.trace}")
        return found


class RunState:
    """Counters and the first error of the current phase, in the store at which the ranks have met.

    Ranks work on shares that take different times, without collectives between samples. A rank that fails writes its
    error to the store, and the others see it between two samples, not at the end of their shares.

    Ranks: the whole world.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = shared_store(f"run_state_{next(cached('run states', count))}")
        self._phase, self._checked = 0, 0.0

    def begin(self) -> None:
        """Start a phase. All ranks are in the same phase, because each waits in `end`."""
        self._phase += 1

    def count(self, number: int) -> int:
        """Add to the phase's counter. Returns: the sum over all ranks."""
        return int(self._store.add(self._key("count"), number))

    def fail(self, error: Exception) -> None:
        """Write an error, if it is the first one of this phase."""
        text = json.dumps(asdict(RankError.of(self.rank, error)))
        if self._store.add(self._key("failures"), 1) == 1:
            self._store.set(self._key("error"), text)

    def check(self) -> None:
        """Raise StoppedElsewhere if another rank failed. Asks the store every half second at most."""
        now = time.monotonic()
        if now - self._checked >= _CHECK_S:
            self._checked = now
            if self._has_failed():
                raise StoppedElsewhere

    def end(self, on_count: Callable[[int], object]) -> RankError | None:
        """Wait until all ranks have ended the phase. Returns: the first error, the same on all ranks.

        Args: on_count: called with the counter while this rank waits.
        """
        deadline: float | None = None
        arrived: Any = dist.all_reduce(torch.zeros(1), async_op=True)  # fails if a rank has died
        while not arrived.is_completed():
            time.sleep(_POLL_S)
            on_count(self.count(0))
            if deadline is None and self._has_failed():
                deadline = time.monotonic() + _GIVE_UP_S
            if deadline is not None and time.monotonic() > deadline:
                return self._error()
        arrived.wait()
        on_count(self.count(0))
        if not self._has_failed():
            return None
        error = self._error()
        dist.all_reduce(torch.zeros(1))  # rank 0 may end, and its store with it, once all have read the error
        return error

    def _has_failed(self) -> bool:
        return bool(self._store.add(self._key("failures"), 0))

    def _error(self) -> RankError:
        self._store.wait([self._key("error")], _REQUEST_TIMEOUT)  # until it is written
        return RankError(**json.loads(self._store.get(self._key("error"))))

    def _key(self, name: str) -> str:
        return f"{self._phase}/{name}"


T = TypeVar("T")
Report = Callable[[int], object]  # called with the number of items that are done


def _ignore(_: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class EncodingRanks:
    """Ranks of a precompute run: groups of `vae_ranks` ranks encode one picture or clip together.

    Attributes:
        rank: this rank.
        size: number of ranks.
        data_rank: index of this rank's group.
        data_size: number of groups.
        groups: this rank's group; None if groups have one rank.
        state: progress and errors of all ranks; None if there is one rank.
    """

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1
    groups: MeshGroups | None = None
    state: RunState | None = None

    @classmethod
    def of_world(cls, vae_ranks: int = 1) -> EncodingRanks:
        """Divide the world into groups of `vae_ranks` ranks. Ranks: the whole world.

        Raises: ValueError: `vae_ranks` does not divide the number of ranks.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            if vae_ranks != 1:
                raise ValueError(f"vae_ranks={vae_ranks} needs as many ranks, but there is one")
            return cls()
        from lightning_cp.config import ContextParallelConfig
        from lightning_cp.pipelines import sampling_ranks

        rank, size = dist.get_rank(), dist.get_world_size()
        if vae_ranks < 1 or size % vae_ranks:
            raise ValueError(f"vae_ranks={vae_ranks} must divide the number of ranks, {size}")
        state = RunState()
        if vae_ranks == 1:
            return cls(rank, size, rank, size, state=state)
        ranks = sampling_ranks(ContextParallelConfig(ring_degree=vae_ranks))
        return cls(rank, size, ranks.data_rank, ranks.data_size, ranks.sample, state)

    @property
    def writes_media(self) -> bool:
        """True on the first rank of each group."""
        return self.groups is None or self.groups.context_rank == 0

    @contextmanager
    def phase(self, on_count: Report = _ignore) -> Iterator[Report]:
        """Run one phase on all ranks. An exception on one rank ends the phase, and is raised on every rank.

        Args: on_count: called with the number of items that all ranks have done.
        Yields: function to call with the number of items that this rank has done.
        Ranks: the whole world.
        """
        done = 0

        def report(number: int) -> None:
            nonlocal done
            done += number
            on_count(done if self.state is None else self.state.count(number))

        if self.state is None:
            yield report
            return
        self.state.begin()
        ours: Exception | None = None
        try:
            yield report
        except StoppedElsewhere:
            pass
        except Exception as error:
            ours = error
            self.state.fail(error)
        first = self.state.end(on_count)
        if first is None:
            return
        if ours is not None and (first.rank == self.rank or str(ours) == first.text):
            raise ours  # with its own traceback
        raise first.exception()

    def check(self) -> None:
        """End this rank's phase early if another rank has failed. Call it between two samples."""
        if self.state is not None:
            self.state.check()

    def on_first(self, function: Callable[[], T]) -> T:
        """Run a function on rank 0 and return its result on every rank; its exception is raised on every rank."""
        result: Any = None
        with self.phase():
            if self.rank == 0:
                result = function()
        if self.size > 1:
            message = [result]
            dist.broadcast_object_list(message, src=0)
            (result,) = message
        found: T = result
        return found

    def from_writer(self, value: T) -> T:
        """Return the value of the group's first rank. Ranks: the whole group."""
        if self.groups is None or self.groups.context is None:
            return value
        message = [value]
        dist.broadcast_object_list(message, group=self.groups.context, group_src=0)
        return message[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. Ranks: the whole world."""
        return gather_objects(value, None if self.size == 1 else dist.group.WORLD)


def rank_device(accelerator: str, local_rank: int) -> torch.device:
    """Return this rank's device. Args: accelerator: cpu or cuda."""
    return torch.device("cuda", local_rank) if accelerator == "cuda" else torch.device("cpu")
