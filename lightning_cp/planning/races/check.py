"""Compare the traces of all ranks: races on buffers, transfers that do not match, and ranks that block each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from lightning_cp.planning.races.events import Access, Buffer, Channel, Misread, Released, Started, Trace, Waited


def check_ranks(traces: Sequence[Trace]) -> list[str]:
    """Return the faults of a program, each with rank, transfer and operator; none if all ranks fit together.

    Args: traces: traces of all ranks, see `trace_all_ranks`.
    """
    return [
        *dict.fromkeys(fault for trace in traces for fault in _races(trace)),
        *_mismatches(traces),
        *_blocked(traces),
    ]


def _races(trace: Trace) -> Iterator[str]:
    """Yield what a rank does to buffers in flight."""
    in_flight: dict[int, Started] = {}
    for event in trace.events:
        if isinstance(event, Started):
            in_flight[event.number] = event
            others = [x for x in in_flight.values() if x is not event]
            for buffers, writes, against in ((event.sent, False, others), (event.received, True, in_flight.values())):
                for buffer in buffers:
                    access = Access(str(event), buffer.storage, ((buffer.start, buffer.stop),), writes)
                    yield from _conflicts(trace.rank, access, against, event)
        elif isinstance(event, Access):
            yield from _conflicts(trace.rank, event, in_flight.values())
        elif isinstance(event, Waited):
            in_flight.pop(event.number)
        elif isinstance(event, Released):
            yield f"rank {trace.rank}: a buffer of {in_flight[event.number]} is {event.how} before the wait"
        elif isinstance(event, Misread):
            yield (
                f"rank {trace.rank}: {event.operator} reads {event.found} as {event.argument}, after transfer "
                f"{event.number}: tensors were swapped"
            )
    for start in in_flight.values():
        yield f"rank {trace.rank}: {start} is never waited for"


def _conflicts(rank: int, access: Access, started: Iterable[Started], by: Started | None = None) -> Iterator[str]:
    """Yield the buffers in flight that an access must not touch: reads and writes of received ones, writes of sent."""
    verb = "writes" if access.writes else "reads"
    for start in started:
        sides = [("sends to", start.sent)] if access.writes else []
        if start is not by:
            sides.append(("receives from", start.received))
        for side, buffers in sides:
            for buffer in buffers:
                if _overlap(access, buffer):
                    text = f"bytes [{buffer.start}, {buffer.stop}) that {start} {side} rank {buffer.peer}"
                    yield f"rank {rank}: {access.operator} {verb} {text}, before the wait"


def _overlap(access: Access, buffer: Buffer) -> bool:
    return access.storage == buffer.storage != 0 and any(
        max(first, buffer.start) < min(last, buffer.stop) for first, last in access.spans
    )


class _Message(NamedTuple):
    start: Started
    size: int


_Messages = dict[Channel, list[_Message]]


def _messages(traces: Sequence[Trace]) -> tuple[_Messages, _Messages]:
    """Return what is sent, and what is received, on each channel, in order."""
    sent: _Messages = {}
    received: _Messages = {}
    for trace in traces:
        for event in trace.events:
            if isinstance(event, Started):
                for messages, buffers in ((sent, event.sent), (received, event.received)):
                    for x in buffers:
                        channel = event.channel(trace.rank, x.peer, sends=messages is sent)
                        messages.setdefault(channel, []).append(_Message(event, x.stop - x.start))
    return sent, received


def _mismatches(traces: Sequence[Trace]) -> Iterator[str]:
    """Yield the first message on each channel that one of its ranks does not expect."""
    sent, received = _messages(traces)
    active = {trace.rank for trace in traces if trace.events}
    for channel in dict.fromkeys((*sent, *received)):
        source, target = channel.source, channel.target
        for out, into in zip_longest(sent.get(channel, ()), received.get(channel, ())):
            if out is None or into is None:
                one, other = (source, target) if into is None else (target, source)
                verb = f"sends {out.size} bytes to" if into is None else f"expects {into.size} bytes from"
                missing = "makes no transfer at all" if other not in active else "does not take part"
                yield f"rank {one}: {(out or into).start} {verb} rank {other}, which {missing}"
            elif (out.size, out.start.operator) != (into.size, into.start.operator):
                yield (
                    f"rank {source}: {out.start} sends {out.size} bytes to rank {target}, which expects {into.size} "
                    f"bytes there, in its {into.start}"
                )
            else:
                continue
            break


_Place = tuple[int, int]  # rank, number of the transfer


def _blocked(traces: Sequence[Trace]) -> list[str]:
    """Return the ranks that block each other: with one queue per communicator, otherwise with one queue per rank.

    NCCL runs the transfers of a communicator in order, a batch of sends and receives as one. It may also run those of
    two communicators one after another, so their order must be the same on all ranks.
    """
    queues = ((False, "deadlock"), (True, "possible deadlock, as communicators are used in different orders"))
    for is_serial, name in queues:
        faults = [f"{name}: {text}" for text in _stuck(traces, is_serial=is_serial)]
        if faults:
            return faults
    return []


def _stuck(traces: Sequence[Trace], *, is_serial: bool) -> Iterator[str]:
    """Simulate the queues; yield the first transfer of each rank that never ends.

    A transfer begins once those that it must follow have ended, and ends once those of all its peers have begun.
    """
    starts = {(t.rank, e.number): e for t in traces for e in t.events if isinstance(e, Started)}
    follows = {place: before for trace in traces for place, before in _order(trace, is_serial=is_serial)}
    peers = _peers(traces)
    begun: set[_Place] = set()
    ended: set[_Place] = set()
    changes = True
    while changes:
        new_begun = {place for place in starts if place not in begun and follows[place] <= ended}
        begun |= new_begun
        new_ended = {x for x in begun - ended if None not in peers[x] and peers[x] <= begun}
        ended |= new_ended
        changes = bool(new_begun or new_ended)
    seen: set[int] = set()
    for rank, number in starts:
        if (rank, number) in begun - ended and rank not in seen:
            seen.add(rank)
            waits_for = [x for x in peers[rank, number] - begun if x is not None]
            text = ", ".join(f"rank {peer} to begin its {starts[peer, n]}" for peer, n in sorted(waits_for))
            yield f"rank {rank}: {starts[rank, number]} waits for {text or 'a rank that does not take part'}"


def _order(trace: Trace, *, is_serial: bool) -> Iterator[tuple[_Place, set[_Place]]]:
    """Yield each transfer of a rank, and those that must end before it begins."""
    last: dict[object, _Place] = {}
    waited: set[_Place] = set()
    for event in trace.events:
        if isinstance(event, Waited):
            waited.add((trace.rank, event.number))
        elif isinstance(event, Started):
            queue = None if is_serial else event.communicator
            yield (trace.rank, event.number), waited | ({last[queue]} if queue in last else set())
            last[queue] = trace.rank, event.number


def _peers(traces: Sequence[Trace]) -> dict[_Place, set[_Place | None]]:
    """Return the transfers with which each one exchanges messages; None: a message without a counterpart."""
    sent, received = _messages(traces)
    peers: dict[_Place, set[_Place | None]] = {
        (t.rank, e.number): set() for t in traces for e in t.events if isinstance(e, Started)
    }
    for channel in dict.fromkeys((*sent, *received)):
        for out, into in zip_longest(sent.get(channel, ()), received.get(channel, ())):
            source = None if out is None else (channel.source, out.start.number)
            target = None if into is None else (channel.target, into.start.number)
            if source is not None:
                peers[source].add(target)
            if target is not None:
                peers[target].add(source)
    return peers
