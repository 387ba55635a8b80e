"""Divide a transformer's blocks over ranks: each rank computes one stage of them, for one patch after another.

Each stage runs the model's own forward. Blocks of earlier stages are replaced by placeholders: the last of them returns
the tensors that the previous stage sent, the others return zeros that take no memory. After the last block of its
stage a rank sends that block's outputs on, and ends the forward. Only the last stage computes the end of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp.comm.packet import Layout, pack, packet_bytes, unpack
from lightning_cp.comm.transfer import Pending, exchange
from lightning_cp.engine.installed import Installed
from lightning_cp.engine.paths import submodule
from lightning_cp.engine.sharders import shard_arguments
from lightning_cp.errors import PlanError
from lightning_cp.mesh import MeshGroups
from lightning_cp.patching import Undo, intercept_calls
from lightning_cp.pipelines.forms import Form, form_and_tensors


def blocks_of(installed: Installed) -> list[str]:
    """Return the paths of a transformer's blocks, in the order of its forward."""
    return [path for rule in installed.rules.arguments if rule.is_block for path in rule.paths]


def divide_blocks(costs: Sequence[int], stages: int) -> list[range]:
    """Divide consecutive blocks into stages, so that the most expensive stage is as cheap as possible.

    Args: costs: cost of each block. stages: number of stages, at most the number of blocks.
    Returns: indices of the blocks of each stage; each stage has at least one.
    """
    best: dict[tuple[int, int], tuple[int, int]] = {(0, 0): (0, 0)}  # (stages, blocks) -> (cost, start of the last)
    for used in range(1, stages + 1):
        for stop in range(used, len(costs) - (stages - used) + 1):
            options = [
                (max(best[used - 1, start][0], sum(costs[start:stop])), -start)
                for start in range(used - 1, stop)
                if (used - 1, start) in best
            ]
            cost, start = min(options)
            best[used, stop] = (cost, -start)
    found, stop = [], len(costs)
    for used in range(stages, 0, -1):
        start = best[used, stop][1]
        found.append(range(start, stop))
        stop = start
    return found[::-1]


class _StageDone(BaseException):
    """Ends a forward after the last block of this rank's stage. `except Exception` in model code does not catch it."""


@dataclass(eq=False)
class BlockStage:
    """One rank's stage of a transformer's blocks.

    Attributes:
        groups: the ranks that hold the stages, as a ring, in order.
        blocks: all blocks of the transformer.
        own: indices of this stage's blocks in `blocks`.
        forms: forms of the outputs of all blocks before this stage, by `key`. The previous stage sends them once.
        sent_forms: forms of the outputs of all blocks up to this stage, as sent to the next one.
        results: forms of the model's result, by `key`.
        key: identifies the shapes of the current forward; the same on all stages.
    """

    installed: Installed
    groups: MeshGroups
    blocks: list[nn.Module]
    own: range
    forms: dict[Any, list[Form]] = field(default_factory=dict)
    sent_forms: dict[Any, list[Form]] = field(default_factory=dict)
    results: dict[Any, Form] = field(default_factory=dict)
    key: Any = None
    _outputs: list[Form] = field(default_factory=list)
    _received: list[Any] = field(default_factory=list)
    _incoming: dict[Any, tuple[Tensor, Pending]] = field(default_factory=dict)
    _sent: list[Pending] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """True for the stage with the first block."""
        return self.own.start == 0

    @property
    def is_last(self) -> bool:
        """True for the stage with the last block."""
        return self.own.stop == len(self.blocks)

    def install(self) -> list[Undo]:
        """Replace the blocks of earlier stages, and end forwards after the last block of this stage."""
        undo = [intercept_calls(self.blocks[i], partial(self._placeholder, i)) for i in range(self.own.start)]
        return undo + [intercept_calls(self.blocks[i], partial(self._block, i)) for i in self.own]

    def forward(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
        """Run this stage of one forward. Returns: the model's result on the last stage, None on the others."""
        self.key, self._outputs, self._received = key, [], []
        try:
            result = compute(*args, **kwargs)
        except _StageDone:
            return None
        if not self.is_last:
            raise PlanError(f"{type(self.installed.module).__name__} returned before the last block of its stage ran")
        return result

    def expect(self, keys: Sequence[Any]) -> None:
        """Start to receive the tensors of the next forwards, in order, so that transfers overlap with computation."""
        for key in keys:
            if self.is_first or key not in self.forms:
                return  # its form arrives first, in a message of its own
            if key not in self._incoming:
                self._incoming[key] = self._start_receive(key)

    def broadcast_result(self, result: Any, key: Any) -> Any:
        """Send the result of the last stage to all stages, and return it. Ranks: all stages."""
        last = self.groups.context_size - 1
        others = list(range(last))
        if key not in self.results:
            own_form = form_and_tensors(result)[0] if self.is_last else None
            self.results[key] = _broadcast_object(own_form, last, self._group)
        form = self.results[key]
        if self.is_last:
            found, tensors = form_and_tensors(result)
            _check_same(found.layout, form.layout)
            packet = pack(tensors)
            exchange([(rank, packet) for rank in others], [], group=self._group).wait()
            received = result
        else:
            buffer = _empty_packet(form.layout, form.device)
            exchange([], [(last, buffer)], group=self._group).wait()
            received = form.filled(unpack(buffer, form.layout))
        for pending in self._sent:
            pending.wait()
        self._sent = []
        return received

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self.groups.context is not None, "there are several stages"
        return self.groups.context

    def _placeholder(self, index: int, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what block `index` of an earlier stage would return: received tensors, or zeros."""
        shard_arguments(self.blocks[index], args, kwargs)  # they define the lengths of modalities
        if not self._received:
            self._receive()
        return self._received[index]

    def _block(self, index: int, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block of this stage. After the last one, send its outputs and end the forward."""
        output = call(*args, **kwargs)
        if self.is_last:
            return output
        form, tensors = form_and_tensors(output)
        self._outputs.append(form)
        if index + 1 == self.own.stop:
            self._send(tensors)
            raise _StageDone
        return output

    def _receive(self) -> None:
        """Receive the outputs of the block before this stage; make zeros for the earlier ones."""
        if self.key not in self.forms:
            self.forms[self.key] = _receive_object(self.groups.context_rank - 1, self._group)
        expected = self._incoming.pop(self.key) if self.key in self._incoming else None
        buffer, pending = expected or self._start_receive(self.key)
        pending.wait()
        *earlier, last = self.forms[self.key]
        self._received = [
            form.filled([torch.zeros((), dtype=x.dtype, device=form.device).expand(x.shape) for x in form.layout])
            for form in earlier
        ]
        self._received.append(last.filled(unpack(buffer, last.layout)))

    def _start_receive(self, key: Any) -> tuple[Tensor, Pending]:
        form = self.forms[key][-1]
        buffer = _empty_packet(form.layout, form.device)
        return buffer, exchange([], [(self.groups.context_rank - 1, buffer)], group=self._group)

    def _send(self, tensors: list[Tensor]) -> None:
        """Send the outputs of this stage's last block; before the first such forward, also their form."""
        to, forms = self.groups.context_rank + 1, [*(self.forms.get(self.key) or []), *self._outputs]
        if self.key not in self.sent_forms:
            self.sent_forms[self.key] = forms
            _send_object(forms, to, self._group)
        _check_same(forms[-1].layout, self.sent_forms[self.key][-1].layout)
        self._sent.append(exchange([(to, pack(tensors))], [], group=self._group))


def make_stage(installed: Installed, groups: MeshGroups, counts: Sequence[int] | None = None) -> BlockStage:
    """Divide the blocks of a transformer over the ranks of `groups`.

    Args: counts: number of blocks of each stage; None: balanced by the number of parameters.
    Raises: ValueError: more stages than blocks, or the counts do not fit.
    """
    model, stages = installed.module, groups.context_size
    name, paths = type(model).__name__, blocks_of(installed)
    blocks = [submodule(model, path) for path in paths]
    if len(blocks) < stages:
        raise ValueError(f"pipe={stages} must be at most the number of blocks of {name}, {len(blocks)}")
    if counts is None:
        divided = divide_blocks([sum(p.numel() for p in block.parameters()) for block in blocks], stages)
    else:
        if len(counts) != stages or min(counts) < 1 or sum(counts) != len(blocks):
            raise ValueError(
                f"pipe={list(counts)} must have one positive number of blocks for each of the {stages} stages, and sum "
                f"to the {len(blocks)} blocks of {name}"
            )
        ends = [sum(counts[: i + 1]) for i in range(stages)]
        divided = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return BlockStage(installed, groups, blocks, divided[groups.context_rank])


def release_others(stage: BlockStage) -> None:
    """Free the weights of the blocks of other stages. The model can then no longer be saved on this rank."""
    for index, block in enumerate(stage.blocks):
        if index in stage.own:
            continue
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.data = tensor.new_empty(0)
    stage.installed.module.register_state_dict_pre_hook(_refuse_state)  # type: ignore[no-untyped-call]


def _refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise PlanError(
        f"{type(module).__name__} has only the blocks of this rank's stage (pipe > 1), so its weights cannot be saved: "
        "save the pipeline before parallelize_pipeline"
    )


def _empty_packet(layout: Layout, device: torch.device) -> Tensor:
    return torch.empty(packet_bytes(layout), dtype=torch.uint8, device=device)


def _check_same(found: Layout, expected: Layout) -> None:
    if list(found) != list(expected):
        raise PlanError(
            f"a forward with arguments of the same shapes had results {list(expected)} before and {list(found)} now, "
            "so stages of blocks cannot exchange them: use pipe=1"
        )


def _send_object(value: Any, to: int, group: dist.ProcessGroup) -> None:
    dist.send_object_list([value], group=group, group_dst=to)


def _receive_object(source: int, group: dist.ProcessGroup) -> Any:
    received: list[Any] = [None]
    dist.recv_object_list(received, group=group, group_src=source)
    return received[0]


def _broadcast_object(value: Any, source: int, group: dist.ProcessGroup) -> Any:
    """Broadcast an object from one rank of the group."""
    held = [value]
    dist.broadcast_object_list(held, group=group, group_src=source)
    return held[0]
