"""A plan: what to split, gather and leave alone in a model, as data.

Tokens come in *streams* ("image", "text"): each is cut into one contiguous shard for each rank of a context group.
A tensor of a model holds one stream along some dim, or several one after the other (`[text | image]`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union

Streams = tuple[str, ...]

LOCAL: Streams = ()
"""Streams of attention that stays on its rank: its keys are whole there (cross-attention on replicated text)."""


@dataclass(frozen=True)
class Split:
    """Where a tensor's tokens lie. `ndim`: leave a tensor of another number of dims whole."""

    dim: int
    streams: Streams
    ndim: int | None = None


def split(dim: int, *streams: str, ndim: int | None = None) -> Split:
    """`Split(dim, streams)`, short enough for a table."""
    return Split(dim, streams, ndim)


# One tensor, or all of a list; a tuple with an entry for each element; a dict with entries for some of its keys.
Spec = Union[Split, tuple["Spec | None", ...], Mapping[str, "Spec"]]  # noqa: UP007 -- refers to itself


@dataclass(frozen=True)
class Pad:
    """Arguments of the model: tokens [b, s, ...] that may be padded at their end, and their mask [b, s]."""

    tokens: str
    mask: str


@dataclass(frozen=True)
class Plan:
    """How one model class is run context-parallel.

    Attributes:
        blocks: for each list of blocks, in the order of the forward: its arguments that hold tokens. What is whole
            (has the global length) is split, what is a shard already stays; a length of 1 that broadcasts stays.
        gather: modules whose output is made whole ("blocks.-1": the last). A tuple gives an entry for each output.
        inputs: arguments of the model itself that are split before its forward.
        attention: modules (name within a block, `*` allowed) and the streams that attend to each other there; LOCAL
            for those on replicated keys. Not listed: all streams.
        main: the stream that must have a token for each rank; others may be shorter than the group.
        pads: texts that are padded to a token for each rank, because the class' own code cannot deal with none.
        unused: parameters (`*` allowed) that never get a gradient.
        required: arguments of the model that must be given, and why.
        refused: arguments of the model or of a block that must be left out, and why.
    """

    blocks: Mapping[str, Mapping[str, Spec]]
    gather: Mapping[str, Spec]
    inputs: Mapping[str, Spec] = field(default_factory=dict)
    attention: Mapping[str, Streams] = field(default_factory=dict)
    main: str = "image"
    pads: tuple[Pad, ...] = ()
    unused: tuple[str, ...] = ()
    required: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def streams(self) -> Streams:
        """All streams of the plan, main first."""
        found = [self.main]
        for specs in (self.inputs, *self.blocks.values()):
            for spec in specs.values():
                found += _streams(spec)
        return tuple(dict.fromkeys(found))


def _streams(spec: Spec | None) -> list[str]:
    if spec is None:
        return []
    if isinstance(spec, Split):
        return list(spec.streams)
    entries = spec.values() if isinstance(spec, Mapping) else spec
    return [stream for entry in entries for stream in _streams(entry)]
