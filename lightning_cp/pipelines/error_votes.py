"""Votes of the ranks that share a sample: an error on one rank ends a pipeline call on all of them, and only this call.

A rank that raises in the middle of a call would let the others wait in their next exchange. Therefore all ranks vote
before each step of a call that has exchanges (a transformer call, a decode), and at the start and end of the call. A
rank that has raised votes too, and all others then raise its error. Votes use a separate group, so that a vote of one
rank cannot be matched with an exchange of another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_cp.comm.agree import gather_objects, text_of
from lightning_cp.comm.background import BackgroundGather, gather_in_background
from lightning_cp.comm.lost_connections import raise_if_lost
from lightning_cp.errors import CallFailedError

_GOES_ON, _ENDED, _FAILED, _DECLINES = range(4)
_APART = "A rank failed before an exchange that others have begun"
_GRACE_S = 10.0  # to wait for the others' votes after an error inside an exchange, where they may wait for this rank


class _Caller:
    """The thread that calls parallel pipelines now: ranks could run calls of several threads in different orders."""

    def __init__(self) -> None:
        self._lock, self._thread, self._depth = threading.Lock(), threading.current_thread(), 0

    def enter(self, name: str) -> None:
        """Begin a call, possibly inside another one. Raises: RuntimeError: another thread is in a call."""
        with self._lock:
            if self._depth and self._thread is not threading.current_thread():
                raise RuntimeError(
                    f"{name} is called while the thread {self._thread.name} is in a call of a parallel pipeline: let "
                    "one thread make all calls, or let threads share the leader of lightning_cp.pipelines.follow"
                )
            self._thread, self._depth = threading.current_thread(), self._depth + 1

    def leave(self) -> None:
        with self._lock:
            self._depth -= 1


_caller = _Caller()


class Votes:
    """The votes during the calls of one parallel pipeline.

    Args:
        name: class name of the pipeline, for errors.
        group: gloo group of the ranks that share a sample; None for one rank, which needs no votes.

    Attributes:
        broken: the error after which this rank can make no further call, because the others may wait inside an
            exchange; None at first.
        has_pending: returns True while other ranks do not have this rank's results, or it does not have theirs: an
            error then counts as one inside an exchange.
        progress: returns the number of exchanges without votes that this rank has begun. If it differs between ranks
            when a call fails, some of them wait for exchanges that others will not begin.
        interrupt: called before each vote to go on. It may raise, which ends the call on all ranks.
        has_leader: True on rank 0 inside `follow`: calls must go through its `Leader`.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self._name, self._group = name, group
        self._depth = 0
        self._in_exchanges = False
        self._common: CallFailedError | None = None  # raised by a vote, and so on all ranks
        self.broken: BaseException | None = None
        self.has_pending: Callable[[], bool] = lambda: False
        self.progress: Callable[[], int] = lambda: 0
        self.interrupt: Callable[[], None] = lambda: None
        self.has_leader = False

    @contextmanager
    def call(self, *, by_leader: bool = False) -> Iterator[None]:
        """Run one call in this context; inside another one it does nothing.

        Raises: CallFailedError: another rank has failed. RuntimeError: an earlier call broke the pipeline; another
            thread is in a call.
        """
        self.check_usable()
        if self.has_leader and not by_leader and not self._depth:
            raise RuntimeError(
                f"inside follow, call leader(…) in place of the {self._name}, so that all ranks take part"
            )
        with self._only_one_thread():
            yield from self._in_call()

    @contextmanager
    def _only_one_thread(self) -> Iterator[None]:
        if self._group is None:
            yield
            return
        try:
            _caller.enter(self._name)
        except RuntimeError as error:
            if not self._depth:  # else this pipeline is in the other thread's call
                self._fail(error)
            raise
        try:
            yield
        finally:
            _caller.leave()

    def _in_call(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
            if self._depth == 1:
                self._vote(_ENDED)
        except Exception as error:
            if self._depth == 1 and error is not self._common:
                named = self._named(error)
                self._fail(named)
                raise named from named.__cause__
            raise
        except BaseException as error:  # interrupted somewhere, so the ranks no longer match
            self.broken = error if self._group is not None else None
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._in_exchanges, self._common = False, None

    @contextmanager
    def before_exchanges(self) -> Iterator[None]:
        """Vote, then run the exchanges in this context. Outside of a call there is no vote.

        While results of earlier exchanges are pending there is no vote either, because it would wait for all ranks.
        """
        if not self.has_pending():
            self.check()
        self._in_exchanges = True
        yield
        self._in_exchanges = self.has_pending()  # an error leaves it set

    def end_exchanges(self) -> None:
        """Note that no results are pending any more."""
        self._in_exchanges = False

    def check(self) -> None:
        """Vote to go on. Ranks: all that share the sample. Raises: CallFailedError: another rank has failed."""
        if self._depth:
            self._vote(_GOES_ON)

    def agree(self, yes: bool) -> bool:
        """Vote on a question, inside a call. Ranks: all that share the sample. Returns: True if all say yes.

        Raises: CallFailedError: another rank has failed.
        """
        return _DECLINES not in self._vote(_GOES_ON if yes else _DECLINES)

    def check_usable(self) -> None:
        """Check that no earlier call has failed inside an exchange. Raises: RuntimeError: one has."""
        if self.broken is None:
            return
        way_out = "end the job"
        if not isinstance(self.broken, Exception):  # Ctrl-C, for instance
            way_out = (
                "if all ranks were interrupted, call unparallelize_pipeline and parallelize_pipeline on all of them; "
                "otherwise end the job"
            )
        raise RuntimeError(
            f"this {self._name} can make no further call, because an earlier one failed inside an exchange between "
            f"ranks ({text_of(self.broken)}): {way_out}"
        ) from self.broken

    def _vote(self, vote: int) -> list[int]:
        if vote == _GOES_ON:
            self.interrupt()
        if self._group is None:
            return [vote]
        try:
            votes = _read(self._start(vote))
            errors, are_apart = self._exchange(None) if _FAILED in votes else ([], False)
        except Exception as error:  # a rank has exited
            self.broken = error
            raise self._named(error) from error
        failed = {rank: text for rank, text in enumerate(errors) if text is not None}
        if failed:
            rank, text = next(iter(failed.items()))
            common = self._error_on_all_ranks(
                f"rank {dist.get_global_rank(self._group, rank)} failed in this call of {self._name}: {text}"
            )
            if are_apart:
                self._break(common, _APART)
            raise common
        if _ENDED in votes and any(other != vote for other in votes):
            ended = [dist.get_global_rank(self._group, rank) for rank, other in enumerate(votes) if other == _ENDED]
            raise self._error_on_all_ranks(
                f"ranks {ended} have ended this call of {self._name}, the others have not: all ranks that share a "
                "sample must compute the same steps"
            )
        return votes

    def _error_on_all_ranks(self, message: str) -> CallFailedError:
        self._common = CallFailedError(message)
        return self._common

    def _named(self, error: Exception) -> Exception:
        """Return an error that says that a rank has exited, in place of that of a broken connection."""
        try:
            raise_if_lost(error, f"in this call of {self._name}")
        except CallFailedError as named:
            return named
        return error

    def _fail(self, error: Exception) -> None:
        """Report this rank's error to the other ranks, if they vote in time."""
        if self._group is None or self.broken is not None:
            return
        why = "This rank failed inside an exchange, so the others wait for it"
        try:
            vote = self._start(_FAILED)
            if not self._in_exchanges or vote.is_done(within_s=_GRACE_S):
                _read(vote)
                _, are_apart = self._exchange(text_of(error))
                if not are_apart:
                    return
                why = _APART
        except Exception:  # a rank has exited
            pass
        self._break(error, why)

    def _break(self, error: Exception, why: str) -> None:
        self.broken = error
        error.add_note(f"{why}: the job must end. The pipeline raises at every further call.")

    def _start(self, vote: int) -> BackgroundGather:
        assert self._group is not None, "a single rank does not vote"
        return gather_in_background(torch.tensor([vote], dtype=torch.float64, device="cpu"), group=self._group)

    def _exchange(self, error: str | None) -> tuple[list[str | None], bool]:
        """Gather the errors of all ranks. Returns: these, and True if ranks have begun different exchanges."""
        votes = gather_objects((error, self.progress()), self._group)
        return [text for text, _ in votes], len({progress for _, progress in votes}) > 1


def _read(gather: BackgroundGather) -> list[int]:
    return [int(value) for value in gather.read().flatten()]
