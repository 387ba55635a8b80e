"""PipeFusion's transfers: each rank posts them in an order in which no two ranks wait for each other.

Each rank's calls are recorded without the others. Then the ranks run what was recorded, each one operation at a time,
as where NCCL runs the kernels of all communicators one after another.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_cp.mesh.sample_groups import StageGroup
from lightning_cp.pipelines.pipefusion import links, marked_packets, result_transfers
from lightning_cp.pipelines.pipefusion.links import StageLinks
from lightning_cp.pipelines.pipefusion.patch_runner import PatchRunner, _Forward
from lightning_cp.pipelines.pipefusion.result_transfers import ResultTransfers
from lightning_cp.pipelines.pipefusion.stage_results import StageResults
from lightning_cp.pipelines.pipefusion.stages import BlockStage
from lightning_cp.pipelines.result_layout import form_and_tensors

_LINKS, _RESULTS, _OUTPUT = "links", "results", torch.zeros(6)
_CALLS = 4


@dataclass(eq=False)
class _Operation:
    """A batch of transfers of one rank: in `group`, to or from `peers`."""

    group: str
    sends: bool
    peers: tuple[int, ...]
    met: set[int] = field(default_factory=set)
    done: bool = False
    time: float = 0.0

    def wait(self) -> None:
        _recorded.append(("wait", self))


@dataclass(eq=False)
class _Object:
    """An object that is sent over gloo: both hosts wait."""

    sends: bool
    peer: int
    met: bool = False


_recorded: list[tuple[str, Any]] = []


def _post(sends: Any, receives: Any, *, group: Any) -> _Operation:
    operation = _Operation(group.name, bool(sends), tuple(peer for peer, _ in (*sends, *receives)))
    _recorded.append(("post", operation))
    return operation


def _object(sends: bool, peer: int, value: Any) -> Any:
    _recorded.append(("object", _Object(sends, peer)))
    return value


@contextmanager
def _recording(received: Any) -> Iterator[list[tuple[str, Any]]]:
    """Record the transfers in this context. Args: received: what `receive_object` returns."""
    _recorded.clear()
    zeros = torch.zeros
    with ExitStack() as stack:
        for module in (links, result_transfers):
            stack.enter_context(mock.patch.object(module, "exchange", _post))
            stack.enter_context(mock.patch.object(module, "send_object", lambda value, to, _: _object(True, to, value)))
            read = lambda source, _: _object(False, source, received)  # noqa: E731
            stack.enter_context(mock.patch.object(module, "receive_object", read))
        empty = mock.patch.object(marked_packets.torch, "empty", lambda *size, **given: zeros(*size, **given))
        stack.enter_context(empty)
        stack.enter_context(mock.patch.object(links.dist, "get_global_rank", lambda _, rank: rank))
        yield _recorded


def _program(rank: int, stages: int, patches: int, known: list[list[bool]], fails_at: int | None) -> list[Any]:
    """What one stage posts and waits for in some calls of the transformer, whose steps overlap.

    Args:
        known: for each call and patch, True if its form is known. fails_at: number of a forward that fails here.
    """
    context = mock.Mock()
    context.name, group = _LINKS, mock.Mock()
    group.name, group.size = _RESULTS, lambda: stages
    stage_group = StageGroup(context, rank, stages)
    blocks = [nn.Identity() for _ in range(stages)]
    installed = mock.Mock()
    installed.session.evaluation = None
    stage = BlockStage(installed, StageLinks(stage_group, mock.Mock()), blocks, range(rank, rank + 1))
    results = StageResults(ResultTransfers(stage_group, [group], mock.Mock()), mock.Mock())
    results.overlaps = True
    calls = PatchRunner.__new__(PatchRunner)
    calls.installed, calls.patches, calls.stage, calls.results = installed, patches, stage, results
    key = (id(stage), ("call", patches))
    form, _ = form_and_tensors(_OUTPUT)
    results.transfers._forms[key] = form
    results.transfers._pieces[key] = [[torch.arange(6)[i::patches]] for i in range(patches)]
    forwards = [_Forward((), {}, i, ("call", i)) for i in range(patches)]
    number = 0

    def compute() -> Any:
        nonlocal number
        if not stage.is_first:
            stage._receive()
        _recorded.append(("compute", None))
        number += 1
        if number - 1 == fails_at:
            raise RuntimeError("no memory")
        if stage.is_last:
            return _OUTPUT
        return stage._block(rank, lambda: _OUTPUT, (), {})

    with _recording([form] * rank) as found:
        for call in range(_CALLS):
            for i, forward in enumerate(forwards):
                for forms, by in ((stage.links.forms, rank - 1), (stage.links.sent_forms, rank)):
                    forms.pop(forward.key, None)
                    if known[call][i] and by >= 0:
                        forms[forward.key] = [form] * (by + 1)
            if call:
                results._begin_step(patches)
            calls._run_stage(compute, forwards, "call", 0)
        results.transfers.reset()
        for step in results.steps:
            for result in step.results:
                results.transfers.take(result)
                for pending in result.outgoing:
                    pending.wait()  # type: ignore[attr-defined]
        stage.links.finish()
        return list(found)


def _run(programs: list[list[Any]], *, serial: bool = True) -> tuple[list[str], float]:
    """Run the programs. Transfers take no time, a forward takes 1.

    Args: serial: a rank has one queue; otherwise one for each group.
    Returns: for each rank that cannot go on, what it would do next; the time.
    """
    left = [deque(program) for program in programs]
    queues: dict[tuple[int, str], deque[_Operation]] = defaultdict(deque)
    clocks, moved = [0.0] * len(programs), True
    while moved:
        moved = False
        for rank, program in enumerate(left):
            while program and _goes_on(rank, program[0], left):
                event, what = program.popleft()
                moved = True
                if event == "post":
                    what.time = clocks[rank]
                    queues[rank, "" if serial else what.group].append(what)
                elif event == "wait":
                    clocks[rank] = max(clocks[rank], what.time)
                elif event == "compute":
                    clocks[rank] += 1
        for (rank, name), queue in queues.items():
            for peer in set(queue[0].peers) - queue[0].met if queue else ():
                others = queues.get((peer, name))
                expects = bool(others) and rank in set(others[0].peers) - others[0].met
                if expects and (others[0].group, others[0].sends) == (queue[0].group, not queue[0].sends):
                    queue[0].time = others[0].time = max(queue[0].time, others[0].time)
                    queue[0].met.add(peer)
                    others[0].met.add(rank)
        for queue in queues.values():
            while queue and queue[0].met == set(queue[0].peers):
                done = queue.popleft()
                done.done = moved = True
                if queue:
                    queue[0].time = max(queue[0].time, done.time)
    return [f"rank {rank}: {program[0]}" for rank, program in enumerate(left) if program], max(clocks)


def _goes_on(rank: int, event: tuple[str, Any], left: list[Any]) -> bool:
    kind, what = event
    if kind == "wait":
        return bool(what.done)
    if kind == "object" and what.sends:
        return bool(what.met)
    if kind == "object":
        program = left[what.peer]
        sent = program[0][1] if program and program[0][0] == "object" else None
        if sent is None or not sent.sends or sent.peer != rank:
            return False
        sent.met = True
    return True


_ALL = [[True] * 8] * _CALLS


@pytest.mark.parametrize("patches", range(1, 9))
@pytest.mark.parametrize("stages", range(2, 7))
def test_no_stage_waits_for_another_one_in_a_circle(stages: int, patches: int) -> None:
    stuck, _ = _run([_program(rank, stages, patches, _ALL, None) for rank in range(stages)])
    assert not stuck


@pytest.mark.parametrize("patches", range(1, 9))
@pytest.mark.parametrize("stages", range(2, 7))
def test_stages_compute_all_the_time_after_the_first_forwards(stages: int, patches: int) -> None:
    """Groups run at the same time. With fewer patches than stages, a step waits for the results of the step before."""
    _, time = _run([_program(rank, stages, patches, _ALL, None) for rank in range(stages)], serial=False)
    assert time == (_CALLS - 1) * max(patches, stages) + patches + stages - 1


@pytest.mark.parametrize("seed", range(20))
def test_neither_with_forms_that_are_not_known(seed: int) -> None:
    draw = random.Random(seed)
    stages, patches = draw.randint(2, 6), draw.randint(2, 8)
    known = [[draw.random() < 0.6 for _ in range(patches)] for _ in range(_CALLS)]
    stuck, _ = _run([_program(rank, stages, patches, known, None) for rank in range(stages)])
    assert not stuck


@pytest.mark.parametrize("failing", range(4))
def test_nor_if_a_stage_fails(failing: int) -> None:
    """Its later forwards only pass on that it has failed, in the same order."""
    for fails_at in range(3 * 5, 4 * 5):  # in the last call
        programs = [_program(rank, 4, 5, _ALL, fails_at if rank == failing else None) for rank in range(4)]
        assert not _run(programs)[0]


def test_the_next_input_is_received_while_a_stage_computes() -> None:
    """The second stage of three starts to receive an input before it waits for the one before."""
    program = [x for x in _program(1, 3, 4, _ALL, None) if x[0] != "compute"]
    events = [(kind, what.group, what.sends) for kind, what in program[:5]]
    receive = ("post", _LINKS, False)
    assert events == [receive, receive, ("wait", _LINKS, False), ("post", _LINKS, True), receive]


def test_results_are_not_received_before_the_transfers_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that is wrong is found: results that each stage receives at once."""
    started = ResultTransfers.start
    put = ResultTransfers.put

    def at_once(self: ResultTransfers, *args: Any, **kwargs: Any) -> None:
        put(self, *args, **kwargs)
        started(self)

    monkeypatch.setattr(ResultTransfers, "put", at_once)
    assert _run([_program(rank, 3, 4, _ALL, None) for rank in range(3)])[0]
