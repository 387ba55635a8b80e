"""A process group whose operations run on the coordinator of a strict run; backend "strict"."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.strict.data import bytes_of, check_sizes, form, memory, name_of, place, reduced, write, write_each
from tests.harness.strict.link import Fill, Link, StrictWork
from tests.harness.strict.messages import FirstUse, Transfer

links: list[Link] = []  # of the current job


class StrictGroup(dist.ProcessGroup):
    """Collectives and batches of a group of ranks. Data travels through the coordinator."""

    def __init__(self, rank: int, ranks: Sequence[int], name: str, timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        self._ranks, self._own, self._name, self._group_name = tuple(ranks), rank, f"{name}{list(ranks)}", name
        self._link = links[-1]
        self.options = SimpleNamespace(_timeout=timeout)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> StrictGroup:
        return self

    @property
    def group_name(self) -> str:
        return self._group_name

    def getGroupName(self) -> str:
        return self._group_name

    def getBackendName(self) -> str:
        return "strict"

    def name(self) -> str:
        return "strict"

    def shutdown(self) -> None:
        """Nothing is kept."""

    # --- collectives: for each, what must be equal, the bytes for all members, and its buffers

    def _collective(
        self,
        kind: str,
        data: Sequence[bytes | None],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        fill: Fill = write_each,
    ) -> StrictWork:
        uses = [FirstUse(self._name, self._ranks), FirstUse(f"{kind.split()[0]} on {self._name}", self._ranks)]
        fields = {"communicator": self._name, "members": self._ranks, "kind": kind, "data": tuple(data)}
        return self._link.post(fields, uses, reads, writes, fill)

    def _to_all(self, tensors: Sequence[Tensor]) -> list[bytes]:
        return [bytes_of(tensors)] * len(self._ranks)

    def _to_root(self, tensors: Sequence[Tensor], root: int) -> list[bytes | None]:
        return [bytes_of(tensors) if i == root else None for i in range(len(self._ranks))]

    def allreduce(self, tensors: Any, opts: Any = None) -> StrictWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        kind = f"all_reduce {form(tensors)} {name_of(op)}"
        return self._collective(kind, self._to_all(tensors), tensors, tensors, _reduces(op))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> StrictWork:
        op, root = opts.reduceOp, opts.rootRank
        kind, writes = f"reduce {form(tensors)} {name_of(op)} root {root}", tensors if root == self._own else []
        return self._collective(kind, self._to_root(tensors, root), tensors, writes, _reduces(op))

    def barrier(self, opts: Any = None) -> StrictWork:
        return self.allreduce(torch.zeros(1))

    def broadcast(self, tensors: Any, opts: Any) -> StrictWork:
        tensors, root = [tensors] if isinstance(tensors, Tensor) else tensors, opts.rootRank
        is_root = root == self._own
        data = self._to_all(tensors) if is_root else [None] * len(self._ranks)
        reads, writes = (tensors, []) if is_root else ([], tensors)
        return self._collective(f"broadcast {form(tensors)} root {root}", data, reads, writes, _comes_from(root))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> StrictWork:
        def fill(outputs: Sequence[Tensor], data: Sequence[bytes | None]) -> None:
            for i, x in enumerate(outputs):
                start, stop = place(inputs, i)
                write([x], b"".join(part[start:stop] for part in data if part is not None))

        check_sizes(outputs, [x.numel() * len(self._ranks) for x in inputs])
        return self._collective(f"all_gather {form(inputs)}", self._to_all(inputs), inputs, outputs, fill)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> StrictWork:
        return self.all_gather_single_coalesced([output], [input])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> StrictWork:
        (parts,), (own,) = outputs, inputs
        check_sizes(parts, [own.numel()] * len(self._ranks))
        return self._collective(f"all_gather {form([own])}", self._to_all([own]), [own], parts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> StrictWork:
        check_sizes(inputs, [x.numel() * len(self._ranks) for x in outputs])
        pieces = [np.split(memory(x), len(self._ranks)) for x in inputs]
        data = [b"".join(x[i].tobytes() for x in pieces) for i in range(len(self._ranks))]
        kind = f"reduce_scatter {form(outputs)} {name_of(opts.reduceOp)}"
        return self._collective(kind, data, inputs, outputs, _reduces(opts.reduceOp))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> StrictWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> StrictWork:
        (output,), (parts,) = outputs, inputs
        check_sizes(parts, [output.numel()] * len(self._ranks))
        kind = f"reduce_scatter {form([output])} {name_of(opts.reduceOp)}"
        return self._collective(kind, [bytes_of([x]) for x in parts], parts, [output], _reduces(opts.reduceOp))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> StrictWork:
        return self._collective(f"all_to_all {inputs[0].dtype}", [bytes_of([x]) for x in inputs], inputs, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> StrictWork:
        parts = [
            list(x.split(list(sizes) if sizes else x.shape[0] // len(self._ranks)))
            for x, sizes in ((output, output_sizes), (input, input_sizes))
        ]
        return self.alltoall(*parts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> StrictWork:
        (own,), root = inputs, opts.rootRank
        parts = outputs[0] if root == self._own else []
        return self._collective(f"gather {form([own])} root {root}", self._to_root([own], root), [own], parts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> StrictWork:
        (output,), root = outputs, opts.rootRank
        parts = inputs[0] if root == self._own else []
        data = [bytes_of([x]) for x in parts] or [None] * len(self._ranks)
        return self._collective(f"scatter {form([output])} root {root}", data, parts, [output], _comes_from(root))

    # Names of earlier versions of torch.
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- transfers

    def batch(self, parts: Sequence[tuple[bool, int, Tensor]], communicator: str = "") -> StrictWork:
        """Post one batch of (is a send, peer in this group, buffer)."""
        reads = [x for is_send, _, x in parts if is_send]
        writes = [x for is_send, _, x in parts if not is_send]

        on, own = communicator or self._name, self._ranks[self._own]
        transfers = tuple(
            Transfer(self._ranks[peer], is_send, x.numel() * x.element_size(), str(x.dtype))
            for is_send, peer, x in parts
        )
        uses = [FirstUse(f"a transfer on {on}", (min(own, t.peer), max(own, t.peer))) for t in transfers]
        fields = {
            "communicator": on,
            "members": self._ranks,
            "kind": "",
            "transfers": transfers,
            "data": tuple(bytes_of([x]) if is_send else None for is_send, _, x in parts),
        }
        uses = uses if communicator else [FirstUse(self._name, self._ranks), *uses]
        return self._link.post(fields, uses, reads, writes, None)

    def _alone(self, is_send: bool, peer: int, tensor: Tensor) -> StrictWork:
        """Outside of a batch, NCCL's group of torch has a communicator for each pair."""
        pair = sorted((self._ranks[self._own], self._ranks[peer]))
        return self.batch([(is_send, peer, tensor)], f"of the pair {pair} of {self._name}")

    def send(self, tensors: Any, peer: int, tag: int = 0) -> StrictWork:
        return self._alone(True, peer, tensors[0])

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> StrictWork:
        return self._alone(False, peer, tensors[0])


def _reduces(op: Any) -> Fill:
    return lambda tensors, data: write(tensors, reduced(data, tensors, op))


def _comes_from(root: int) -> Fill:
    return lambda tensors, data: write(tensors, data[root])


def _create(options: Any, _: Any) -> StrictGroup:
    ranks = options.global_ranks_in_group or range(options.group_size)  # empty for the default group
    return StrictGroup(options.group_rank, ranks, options.group_id, options.timeout)


dist.Backend.register_backend("strict", _create, extended_api=True, devices=["cpu"])
