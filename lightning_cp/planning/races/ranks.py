"""Trace all ranks, one after another, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning_cp.comm.buffers import BUFFERS
from lightning_cp.comm.fake_world import fake_world
from lightning_cp.comm.observer import observing
from lightning_cp.planning.races.events import Trace
from lightning_cp.planning.races.recorder import Recorder

_NO_TAGS: Mapping[str, float] = {}


def trace_all_ranks(
    function: Callable[[int], object], world: int, *, hops: int = 2, tags: Mapping[str, float] = _NO_TAGS
) -> list[Trace]:
    """Trace a function on each rank of a world; nothing is sent.

    All ranks are traced `hops + 1` times. In each round a rank receives what the others sent in the round before. If n
    exchanges depend on each other, data are right after n rounds. The traces of the last round are returned.

    Args:
        function: called with the rank. It computes on CPU, and transfers with `lightning_cp`.
        world: number of ranks.
        hops: number of exchanges that depend on each other, of lengths (for a trace), or of values (for `tags`).
        tags: values with which the function fills the query, the key and so on. An operator with an argument of that
            name that reads another value is a fault: what it reads was exchanged with another tensor.
    Raises: what the function raises in the last round; ValueError: this process has a process group.
    """
    traces: list[Trace] = []
    for last in [False] * hops + [True]:
        traces = [trace_rank(function, rank, world, before=traces, tags=tags, raises=last) for rank in range(world)]
    return traces


def trace_rank(
    function: Callable[[int], object],
    rank: int,
    world: int,
    *,
    before: Sequence[Trace] = (),
    tags: Mapping[str, float] = _NO_TAGS,
    raises: bool = True,
) -> Trace:
    """Trace a function on one rank.

    Args:
        function, world, tags: see `trace_all_ranks`.
        before: traces of all ranks of the round before; empty in the first round.
        raises: pass on exceptions of the function; False: the trace ends there.
    """
    BUFFERS.forget()
    recorder = Recorder(rank, before, tags)
    try:
        with fake_world(world, rank), observing(recorder), recorder:
            recorder.trace.result = function(rank)
    except Exception:
        if raises:
            raise
    finally:
        BUFFERS.forget()
    return recorder.trace
