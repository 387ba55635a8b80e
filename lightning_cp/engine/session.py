"""What is known during a forward: which streams are how long, and so which tokens are whose."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.shards import gather, shard_sizes
from lightning_cp.config import ContextParallelConfig
from lightning_cp.errors import PlanError, ShapeError
from lightning_cp.mesh import Groups
from lightning_cp.plans import Spec, Split, Streams


@dataclass
class Call:
    """One forward of a parallel model. Its replays (activation checkpointing) see the same call.

    Attributes:
        lengths: global tokens of each stream met so far.
        whole: tokens of tensor arguments that are left whole (for plans that do not say what attends to what).
        intercepted: whether attention passed through the engine since this was last cleared.
        met: keys for which sizes were found out in this forward.
    """

    groups: Groups
    lengths: dict[str, int] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    intercepted: bool = False
    met: list[Hashable] = field(default_factory=list)

    def key(self) -> Hashable:
        """What is known of lengths so far, the same on all ranks."""
        return tuple(sorted(self.lengths.items())), tuple(sorted(self.whole))

    def sizes(self, streams: Streams) -> list[int]:
        """Tokens of each rank, over `streams` together."""
        size = self.groups.context_size
        each = [shard_sizes(self.lengths[stream], size) for stream in streams]
        return [sum(sizes[rank] for sizes in each) for rank in range(size)]

    def define(self, stream: str, length: int, *, main: str, name: str) -> None:
        """Learn a stream's length. Raises: ShapeError: the main stream has fewer tokens than the group has ranks."""
        size = self.groups.context_size
        if stream == main and length < size:
            raise ShapeError(
                f"{name} holds {length} {stream} tokens, fewer than the {size} ranks of the context group "
                f"(ring={self.groups.context_shape[0]} x ulysses={self.groups.context_shape[1]}): "
                "use lower degrees or a longer sequence"
            )
        self.lengths[stream] = length


@dataclass
class Session:
    """One model run context-parallel.

    Attributes:
        call: the forward under way; None outside.
        kernel: a name; "auto" follows diffusers' backend settings, which choose freely by default.
        backends: diffusers' registry of backends, where the model is one of diffusers'.
        check_peers: forwards whose arguments are still to be compared between peers (-1: all).
        forwards: how many forwards are under way (0 or 1; a model that calls itself: more).
        settled: by `Call.key`, whether each rank can tell all sizes from its own (for plans that do not say).
    """

    groups: Groups
    config: ContextParallelConfig
    main: str
    kernel: str = "auto"
    backends: Any = None
    check_peers: int = 0
    forwards: int = 0
    call: Call | None = None
    settled: dict[Hashable, bool] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> Session:
        return self  # a deep copy of a parallel model (an EMA's, say) belongs to the same session

    def current(self) -> Call:
        """The forward under way. Raises: RuntimeError outside of one."""
        if self.call is None:
            raise RuntimeError(
                "a context-parallel block ran outside of its model's forward, so its token counts are unknown: call "
                "the model as a whole. Activation checkpointing of blocks works with the model's own "
                "enable_gradient_checkpointing(), and with torch.utils.checkpoint(..., use_reentrant=False)"
            )
        return self.call


def cut(value: Any, spec: Spec | None, *, name: str, session: Session, strict: bool) -> Any:
    """`value` (a tensor, or a nest of them) with the tokens of this rank.

    Args:
        spec: where its tokens lie.
        name: of the argument, for errors.
        strict: within the blocks a stream's first tensor tells its length, and a length that is neither whole nor
            local is an error; at the model's own arguments, a length of 1 is left for broadcasting.
    Gradient: a slice; backward pads with zeros.
    Raises: PlanError: a length that fits neither. ShapeError: too few tokens.
    """
    if value is None or spec is None:
        return value
    if isinstance(spec, Split):
        if isinstance(value, Tensor):
            return _cut_tensor(value, spec, name=name, session=session, strict=strict)
        if isinstance(value, (list, tuple)):
            return _like(value, [cut(x, spec, name=name, session=session, strict=strict) for x in value])
        if isinstance(value, dict):
            return {k: cut(x, spec, name=name, session=session, strict=strict) for k, x in value.items()}
    elif isinstance(spec, Mapping) and isinstance(value, dict):
        return {k: cut(x, spec.get(k), name=f"{name}[{k!r}]", session=session, strict=strict) for k, x in value.items()}
    elif isinstance(spec, tuple) and isinstance(value, (list, tuple)):
        if len(spec) != len(value):
            raise PlanError(f"{name} has {len(value)} elements, its plan {len(spec)}")
        pairs = zip(value, spec)
        return _like(value, [cut(x, s, name=name, session=session, strict=strict) for x, s in pairs])
    raise PlanError(f"{name} is a {type(value).__name__}, which its plan's {type(spec).__name__} does not describe")


def _cut_tensor(x: Tensor, spec: Split, *, name: str, session: Session, strict: bool) -> Tensor:
    call = session.current()
    if spec.ndim is not None and x.ndim != spec.ndim:
        return x
    check_dim(x, spec, name)
    dim, n = spec.dim % x.ndim, x.shape[spec.dim]
    if len(spec.streams) == 1 and spec.streams[0] not in call.lengths:
        if n == 1 and not strict:
            return x
        call.define(spec.streams[0], n, main=session.main, name=name)
    missing = [stream for stream in spec.streams if stream not in call.lengths]
    if missing:
        raise PlanError(f"{name} holds the streams {spec.streams}, but nothing told the length of {missing} before it")
    rank, sizes = call.groups.context_rank, call.sizes(spec.streams)
    whole, local = sum(sizes), sizes[rank]
    if n == whole:
        return narrow(x, dim, [shard_sizes(call.lengths[s], len(sizes)) for s in spec.streams], rank)
    if n in (local, 1):
        return x
    raise PlanError(
        f"{name} has {n} tokens in dim {spec.dim}, neither all {whole} of {' + '.join(spec.streams)} nor this rank's "
        f"{local}: the plan does not fit this input"
    )


def check_dim(x: Tensor, spec: Split, name: str) -> None:
    if not -x.ndim <= spec.dim < x.ndim:
        raise PlanError(
            f"{name} is split in dim {spec.dim}, but has shape {tuple(x.shape)}: give expected_dims, or mend it"
        )


def narrow(x: Tensor, dim: int, segments: list[tuple[int, ...]], rank: int) -> Tensor:
    """This rank's slice of each segment of `x`, one after the other. Gradient: backward pads with zeros."""
    pieces, start = [], 0
    for sizes in segments:
        pieces.append(x.narrow(dim, start + sum(sizes[:rank]), sizes[rank]))
        start += sum(sizes)
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous()


def join(value: Any, spec: Spec | None, *, name: str, session: Session) -> Any:
    """`value` (an output, or a tuple of them) made whole on every rank: the adjoint of `cut`.

    Gradient: reduce-scatter (sum). Raises: PlanError: an output that does not hold this rank's tokens.
    """
    if value is None or spec is None:
        return value
    if isinstance(spec, tuple) and isinstance(value, (list, tuple)):
        if len(spec) != len(value):
            raise PlanError(f"{name} returns {len(value)} outputs, its plan has {len(spec)}")
        return _like(value, [join(x, s, name=name, session=session) for x, s in zip(value, spec, strict=True)])
    if not (isinstance(spec, Split) and isinstance(value, Tensor)):
        raise PlanError(f"{name} returns a {type(value).__name__}, which its plan does not describe")
    if spec.ndim is not None and value.ndim != spec.ndim:
        return value
    check_dim(value, spec, name)
    call = session.current()
    sizes = call.sizes(spec.streams)
    if value.shape[spec.dim] != sizes[call.groups.context_rank]:
        raise PlanError(
            f"{name} returns {value.shape[spec.dim]} tokens in dim {spec.dim}, not this rank's "
            f"{sizes[call.groups.context_rank]} of {' + '.join(spec.streams)}"
        )
    each = [n for s in spec.streams for n in shard_sizes(call.lengths[s], len(sizes))]
    return gather(value, spec.dim % value.ndim, each, call.groups.name)


def _like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    return items if isinstance(value, list) else tuple(items)


def cut_always(value: Any, spec: Spec | None, *, name: str, session: Session) -> Any:
    """`cut` as diffusers' plans mean it: whatever comes is split, and a tensor's length is its stream's name."""
    if value is None or spec is None:
        return value
    if isinstance(spec, tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(spec):
            raise PlanError(
                f"{name} has {len(spec)} entries in the plan, but is a {type(value).__name__} of another length"
            )
        pairs = zip(value, spec)
        return _like(value, [cut_always(x, s, name=name, session=session) for x, s in pairs])
    if not (isinstance(spec, Split) and isinstance(value, Tensor)):
        raise PlanError(f"{name} is a {type(value).__name__}, which its plan does not describe")
    if spec.ndim is not None and value.ndim != spec.ndim:
        return value
    check_dim(value, spec, name)
    call, n = session.current(), value.shape[spec.dim]
    call.lengths[str(int(n))] = n
    return narrow(value, spec.dim % value.ndim, [shard_sizes(n, call.groups.context_size)], call.groups.context_rank)
