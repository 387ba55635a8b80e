"""Transfers of results from the last stage to all other ranks, in pieces: one for each forward of a transformer call.

A patch's piece is what this patch completes of the output, which is found out in the first call of a shape. Each piece
ends with a mark: 1 if a stage has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.packet import Layout, Piece
from lightning_cp.comm.transfer import Pending, exchange
from lightning_cp.mesh.sample_groups import StageGroup
from lightning_cp.pipelines.pipefusion.links import (
    check_same,
    empty_packet,
    failure_packet,
    packet_of,
    read_packet,
    receive_object,
    send_object,
)
from lightning_cp.pipelines.pipefusion.stages import BlockStage
from lightning_cp.pipelines.result_layout import Form, forget_oldest, form_and_tensors

_MOST_BYTES = 2**27  # of all positions: 39 MB for a video of 81 frames at 720p
# For each tensor of a result, the flat positions [n] of a piece's elements.
Positions = list[Tensor]


class ResultPieces(NamedTuple):
    """The pieces of a result.

    Attributes:
        numbers: for each tensor, the number of the piece of each element, int16 on the host.
        positions: for each piece, the positions of its elements, on the device of the result.
    """

    numbers: list[Tensor]
    positions: list[Positions]


def parts_of_patches(known: Sequence[Sequence[Tensor]]) -> list[Tensor] | None:
    """Return for each tensor of a result the number of the patch that completes each element, int16 [elements].

    Args: known: for each patch, where each tensor is known when this patch is computed.
    Returns: None if this is not known for all of them.
    """
    if not known or not all(known):
        return None
    numbers = [torch.full(x.shape, len(known) - 1, dtype=torch.int16, device=x.device) for x in known[0]]
    for number in reversed(range(len(known) - 1)):
        for parts, mask in zip(numbers, known[number], strict=True):
            parts[mask] = number
    return [x.flatten().cpu() for x in numbers]


def parts_of_samples(layout: Layout, sizes: Sequence[int]) -> list[Tensor] | None:
    """Return for each tensor of a result the number of the micro-batch of each element, int16 [elements].

    Args: layout: layout of the whole result. sizes: number of samples of each micro-batch.
    Returns: None if this is not clear from the shapes.
    """
    numbers = torch.arange(len(sizes), dtype=torch.int16).repeat_interleave(torch.tensor(sizes))
    by_row = all(piece.shape and piece.shape[0] == len(numbers) for piece in layout)
    by_tensor = len(layout) == len(numbers)
    if by_row == by_tensor:
        return None
    rows = [numbers] * len(layout) if by_row else list(numbers[:, None])
    return [x.repeat_interleave(piece.elements // len(x)) for x, piece in zip(rows, layout, strict=True)]


def positions_of(parts: Sequence[Tensor], pieces: int, device: torch.device) -> list[Positions]:
    """Return the positions of each piece's elements, from the number of the piece of each element.

    A patch may have none: for example, only tokens of padding.
    """
    return [[(x == number).nonzero().flatten().to(device) for x in parts] for number in range(pieces)]


@dataclass(eq=False)
class CallResult:
    """The result of one transformer call, on its way from the last stage to all other ranks.

    Attributes:
        stage: this rank's stage of the transformer.
        key: identifies the transformer, and the shapes of the call.
        owner: the CFG branch that computes the call.
        pieces: the pieces of its tensors; None: the result is sent whole.
        forwards: number of forwards of the call; each gives a piece.
        learns: True if the positions of its pieces are found out in this call.
        tensors: the tensors of the whole result, filled piece by piece.
        incoming: for each piece that this rank has started to receive, the packet and the transfer.
        outgoing: transfers that this rank has started.
        taken: number of received pieces in `tensors`.
        failed: True if a stage has failed in this call, or in an earlier one.
        known: on the last stage, while positions are found out: for each piece, where each tensor is not NaN.
    """

    stage: BlockStage
    key: Hashable
    owner: int
    pieces: ResultPieces | None
    forwards: int
    learns: bool
    tensors: list[Tensor] = field(default_factory=list)
    incoming: list[tuple[Tensor, Pending]] = field(default_factory=list)
    outgoing: list[Pending] = field(default_factory=list)
    taken: int = 0
    failed: bool = False
    known: list[list[Tensor]] = field(default_factory=list)


@dataclass(eq=False)
class ResultTransfers:
    """Sends the results of the last stage to all stages, of all CFG branches.

    All these ranks call the methods in order, except `take`.

    Attributes:
        stages: the ranks that hold the stages of this rank's branch.
        results: for each branch, a process group of the stages of all branches. In each only one rank sends, so that no
            send waits for another one (with NCCL, a rank sends and receives in order).
        control: a gloo group that contains them, for forms and positions.
        branch: this rank's CFG branch.
    """

    stages: StageGroup
    results: Sequence[dist.ProcessGroup]
    control: dist.ProcessGroup
    branch: int = 0
    _forms: dict[Hashable, Form] = field(default_factory=dict)
    _pieces: dict[Hashable, ResultPieces] = field(default_factory=dict)
    _delayed: list[Callable[[], None]] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """True on the first stage."""
        return self.stages.stage == 0

    def is_source(self, result: CallResult) -> bool:
        """Return True on the rank that computes a result: the last stage of its branch."""
        return self.branch == result.owner and self.stages.stage == self.stages.num_stages - 1

    def _source(self, result: CallResult) -> int:
        return (result.owner + 1) * self.stages.num_stages - 1

    def pieces_of(self, stage: BlockStage, key: Hashable) -> ResultPieces | None:
        """Return the pieces of a result; None if they are not known."""
        return self._pieces.get((id(stage), key))

    def forget_oldest(self) -> None:
        """Forget the shapes and positions of the oldest results. Ranks: see `result_layout.forget_oldest`."""
        forget_oldest(self._forms)
        self._pieces = {key: pieces for key, pieces in self._pieces.items() if key in self._forms}  # `put` needs both
        sizes = [sum(x.nbytes for piece in pieces.positions for x in piece) for pieces in self._pieces.values()]
        newest = takewhile(lambda total: total <= _MOST_BYTES, accumulate(reversed(sizes)))
        forget_oldest(self._pieces, max(sum(1 for _ in newest), 1))

    def begin(self, stage: BlockStage, key: Hashable, forwards: int, owner: int, *, in_pieces: bool) -> CallResult:
        """Begin a transformer call.

        Args:
            forwards: number of its forwards.
            owner: the CFG branch that computes it.
            in_pieces: send a piece after each forward, if its positions are known.
        """
        pieces = self.pieces_of(stage, key) if in_pieces else None
        result = CallResult(
            stage, (id(stage), key), owner, pieces, forwards, learns=in_pieces and forwards > 1 and pieces is None
        )
        if result.key in self._forms:
            result.tensors = [x.zero_() for x in self._forms[result.key].empty()]
        return result

    def put(self, result: CallResult, number: int, output: Any, *, is_whole: bool) -> None:
        """Prepare to send the piece of a forward, or to receive it. `start` starts the transfer.

        Args:
            output: on the rank that computes it, the output of the forward; None: a stage has failed.
            is_whole: the output has all elements; those that are not known yet are NaN.
        """
        tensors = [] if output is None else form_and_tensors(output)[1]
        if result.learns and is_whole:
            result.known.append([~x.isnan() for x in tensors])
        if result.pieces is None:
            return
        positions = result.pieces.positions[number]
        layout = [Piece(tuple(p.shape), x.dtype) for p, x in zip(positions, result.tensors, strict=True)]
        if not self.is_source(result):
            self._delayed.append(partial(self._start_receive, result, layout))
            return
        remaining = iter(tensors)
        if not tensors:
            values = []
        elif is_whole:
            values = [x.flatten()[p] for x, p in zip(tensors, positions, strict=True)]
        else:
            values = [
                next(remaining).flatten() if len(p) else x.new_empty(0) for x, p in zip(result.tensors, positions)
            ]
        self._delayed.append(partial(self._send, result, values, layout))

    def start(self, *, newest: int = 0) -> None:
        """Start the transfers of pieces, except the `newest` ones.

        A piece is on its way when the later stages have computed its forward. If a rank started to receive it before
        its own transfers to and from these stages, they could wait for each other.
        """
        while len(self._delayed) > newest:
            self._delayed.pop(0)()

    def reset(self) -> None:
        """Forget the transfers that were not started, after a call that was interrupted."""
        self._delayed = []

    def finish(self, result: CallResult, output: Any, samples: Sequence[int] | None) -> Form | None:
        """End a transformer call: send the result, if it is not sent in pieces.

        Args:
            output: on the rank that computes it, the whole output; None: a stage has failed.
            samples: number of samples of each forward; None: all samples, of a patch.
        Returns: form of the result; None if it is not known yet and a stage has failed.
        """
        self.start()
        key, stage, is_source = result.key, result.stage, self.is_source(result)
        if key not in self._forms:
            local_form = form_and_tensors(output)[0] if is_source and stage.error is None else None
            form = self._broadcast(local_form, result)
            if form is None:
                return None
            self._forms[key] = form
            result.tensors = [x.zero_() for x in form.empty()]
        form = self._forms[key]
        if is_source and stage.error is None:
            own_form, tensors = form_and_tensors(output)
            try:
                check_same(own_form.layout, form.layout)
                result.tensors = [x.contiguous() for x in tensors]
            except Exception as error:
                stage.error = error
        if is_source:
            result.failed = result.failed or stage.error is not None
        if result.pieces is None and is_source:
            self._send(result, result.tensors, form.layout)
        elif result.pieces is None:
            self._start_receive(result, form.layout)
        if result.learns:
            parts = (
                parts_of_samples(form.layout, samples)
                if samples
                else self._broadcast(parts_of_patches(result.known), result)
            )
            if parts is not None:
                positions = positions_of(parts, result.forwards, form.device)
                self._pieces[key] = ResultPieces(
                    [x.view(p.shape) for x, p in zip(parts, form.layout, strict=True)], positions
                )
        return form

    def take(self, result: CallResult, stop: int | None = None) -> bool:
        """Put the received pieces before number `stop` (None: all) into the result. Returns: True if there were any."""
        before = result.taken
        while result.incoming and (stop is None or result.taken < stop):
            packet, pending = result.incoming.pop(0)
            pending.wait()
            positions = None if result.pieces is None else result.pieces.positions[result.taken]
            shapes = [tuple(x.shape) for x in (result.tensors if positions is None else positions)]
            layout = [Piece(shape, x.dtype) for shape, x in zip(shapes, result.tensors, strict=True)]
            values, has_failed = read_packet(packet, layout)
            result.failed = result.failed or has_failed
            result.taken += 1
            for i, value in enumerate([] if result.failed else values):
                if positions is None:
                    result.tensors[i].copy_(value)
                else:
                    result.tensors[i].view(-1)[positions[i]] = value
        return result.taken > before

    def _send(self, result: CallResult, tensors: Sequence[Tensor], layout: Layout) -> None:
        """Send tensors to all other ranks, or only the mark if a stage has failed."""
        result.failed = result.failed or result.stage.error is not None
        device = self._forms[result.key].device
        packet = failure_packet(layout, device) if result.failed else packet_of(tensors, device)
        source, group = self._source(result), self.results[result.owner]
        sends = [(peer, packet) for peer in range(group.size()) if peer != source]
        result.outgoing.append(exchange(sends, [], group=group))

    def _start_receive(self, result: CallResult, layout: Layout) -> None:
        packet = empty_packet(layout, self._forms[result.key].device)
        result.incoming.append(
            (packet, exchange([], [(self._source(result), packet)], group=self.results[result.owner]))
        )

    def _broadcast(self, value: Any, result: CallResult) -> Any:
        """Broadcast an object from the rank that computes a result."""
        ranks = dist.get_process_group_ranks(self.results[result.owner])
        source = ranks.pop(self._source(result))
        if not self.is_source(result):
            return receive_object(source, self.control)
        for target in ranks:
            send_object(value, target, self.control)
        return value
