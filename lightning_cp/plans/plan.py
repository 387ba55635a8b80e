"""A plan: what to split, gather and leave alone in a model, as data.

Tokens come in *streams* ("image", "text"): each is cut into one contiguous shard for each rank of a context group.
A tensor of a model holds one stream along some dim, or several one after the other (`[text | image]`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Union

Streams = tuple[str, ...]

LOCAL: Streams = ()
"""Streams of attention that stays on its rank: its keys are whole there (cross-attention on replicated text)."""


@dataclass(frozen=True)
class Split:
    """Where a tensor's tokens lie.

    Attributes:
        dim: that holds them.
        streams: one after the other.
        ndim: leave a tensor of another number of dims whole.
        local: streams whose part is a shard already, while the others' may be whole.
        folded: the dim holds [batch x tokens], tokens innermost.
    """

    dim: int
    streams: Streams
    ndim: int | None = None
    local: Streams = ()
    folded: bool = False


@dataclass(frozen=True)
class Mask:
    """An attention mask over the tokens of some streams: of keys [b, s] or [..., 1, s], or of rows [..., s, s]."""

    streams: Streams


@dataclass(frozen=True)
class Count:
    """An int that says how many tokens some streams have together, and shall say how many of them are here."""

    streams: Streams


def split(dim: int, *streams: str, ndim: int | None = None, local: Streams = (), folded: bool = False) -> Split:
    """`Split(dim, streams)`, short enough for a table."""
    return Split(dim, streams, ndim, local, folded)


def mask(*streams: str) -> Mask:
    """`Mask(streams)`."""
    return Mask(streams)


def count(*streams: str) -> Count:
    """`Count(streams)`."""
    return Count(streams)


# One tensor, or all of a list; a tuple with an entry for each element; a dict with entries for some of its keys.
Spec = Union[Split, Mask, Count, tuple["Spec | None", ...], Mapping[str, "Spec"]]  # noqa: UP007 -- refers to itself


@dataclass(frozen=True)
class Attention:
    """What attends to what in a module.

    Attributes:
        queries: streams.
        keys: streams; None: those of the queries.
        mask: how the mask comes to the attention call: "given": as `context_parallel_attention` takes it; "keys": made
            for local queries and keys, all rows alike; "outer": made for both, the product of a value for each token.
        ragged: the model's own code drops tokens (padding) before it attends, so ranks tell each other how many are
            left, at every call.
    """

    queries: Streams
    keys: Streams | None = None
    mask: Literal["given", "keys", "outer"] = "given"
    ragged: bool = False


@dataclass(frozen=True)
class Whole:
    """A module within the region that needs all tokens: `arguments` are gathered before it, its output is split."""

    arguments: Mapping[str, Spec]
    output: Spec


@dataclass(frozen=True)
class Pad:
    """Arguments of the model: tokens [b, s, ...] that may be padded at their end, and their mask [b, s]."""

    tokens: str
    mask: str


@dataclass(frozen=True)
class Plan:
    """How one model class is run context-parallel.

    Paths of modules may hold one `*` for each module of a list; "-1" is a list's last.

    Attributes:
        blocks: for each list of blocks, in the order of the forward: its arguments that hold tokens. What is whole
            (has the global length) is split, what is a shard already stays; a length of 1 that broadcasts stays.
            "blocks[a:b]" names some of a list; a bound may be an attribute of the model, or minus one.
        gather: modules whose output is made whole ("blocks.-1": the last). A tuple gives an entry for each output.
        inputs: arguments of the model itself that are split before its forward.
        split_outputs: modules whose output is split, in front of the blocks.
        whole: modules within the blocks, or between them, that run on all tokens, on every rank.
        attention: modules (name within a block, with or without its list before it; `*` allowed) and the streams that
            attend to each other there; LOCAL for those on replicated keys. Not listed: all streams.
        main: the stream that must have a token for each rank; others may be shorter than the group.
        pads: texts that are padded to a token for each rank, because the class' own code cannot deal with none.
        unused: parameters (`*` allowed) that never get a gradient.
        required: arguments of the model that must be given, and why.
        refused: arguments of the model or of a block that must be left out, and why.
        variants: other plans, by an entry of the model's config and its value.
    """

    blocks: Mapping[str, Mapping[str, Spec]]
    gather: Mapping[str, Spec]
    inputs: Mapping[str, Spec] = field(default_factory=dict)
    split_outputs: Mapping[str, Spec] = field(default_factory=dict)
    whole: Mapping[str, Whole] = field(default_factory=dict)
    attention: Mapping[str, Streams | Attention] = field(default_factory=dict)
    main: str = "image"
    pads: tuple[Pad, ...] = ()
    unused: tuple[str, ...] = ()
    required: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[tuple[str, object], Plan] = field(default_factory=dict)

    @property
    def streams(self) -> Streams:
        """All streams of the plan, main first."""
        found = [self.main]
        for specs in (self.inputs, self.split_outputs, *self.blocks.values()):
            for spec in specs.values():
                found += _streams(spec)
        return tuple(dict.fromkeys(found))


def _streams(spec: Spec | None) -> list[str]:
    if spec is None:
        return []
    if isinstance(spec, (Split, Mask, Count)):
        return list(spec.streams)
    entries = spec.values() if isinstance(spec, Mapping) else spec
    return [stream for entry in entries for stream in _streams(entry)]
