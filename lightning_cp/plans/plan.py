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


@dataclass(frozen=True)
class Rows:
    """How many rows (of a picture; or frames) a stream has: it is cut between rows only. Comes before its tensors.

    An int that says so becomes the number of rows here. A tensor with the rows in `dim` stays whole.

    Attributes:
        dim: of a tensor.
        per: entry of the model's config by which that is divided (a patch size; of several, the first).
    """

    stream: str
    dim: int = 0
    per: str = ""


@dataclass(frozen=True)
class Kept:
    """An argument that the engine reads instead of the block, which gets None."""

    name: str


def split(dim: int, *streams: str, ndim: int | None = None, local: Streams = (), folded: bool = False) -> Split:
    """`Split(dim, streams)`, short enough for a table."""
    return Split(dim, streams, ndim, local, folded)


def mask(*streams: str) -> Mask:
    """`Mask(streams)`."""
    return Mask(streams)


def count(*streams: str) -> Count:
    """`Count(streams)`."""
    return Count(streams)


def rows(stream: str, dim: int = 0, per: str = "") -> Rows:
    """`Rows(stream, dim, per)`."""
    return Rows(stream, dim, per)


def kept(name: str) -> Kept:
    """`Kept(name)`."""
    return Kept(name)


# One tensor, or all of a list; a tuple with an entry for each element; a dict with entries for some of its keys.
Leaf = Split | Mask | Count | Rows | Kept
Spec = Union[Leaf, tuple["Spec | None", ...], Mapping[str, "Spec"]]  # noqa: UP007 -- refers to itself


@dataclass(frozen=True)
class Attention:
    """What attends to what in a module.

    Attributes:
        queries: streams.
        keys: streams; None: those of the queries.
        mask: how the mask comes to the attention call. "given": as `context_parallel_attention` takes it; "padded": so,
            but for columns that the model's own code appends where it finds fewer keys than columns; made for local
            queries and keys: "keys": all rows alike, "outer": the product of two tokens' values, each >= 0.
        ragged: the model's own code drops tokens (padding) before it attends, so ranks tell each other how many are
            left, at every call.
        form: "softmax"; "linear": without one, `engine/linear.py`; "block_causal": `engine/segments.py`.
        replaces_processors: names of the processors that do what a form other than "softmax" does.
    """

    queries: Streams
    keys: Streams | None = None
    mask: Literal["given", "padded", "keys", "outer"] = "given"
    ragged: bool = False
    form: Literal["softmax", "linear", "block_causal"] = "softmax"
    replaces_processors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Whole:
    """A module that needs all tokens: `arguments` are gathered before it, its output is split.

    Attributes:
        output: None: left whole, where the region ends.
        only: name of a class; modules of others at these places are left alone.
    """

    arguments: Mapping[str, Spec]
    output: Spec | None = None
    only: str = ""


@dataclass(frozen=True)
class Pad:
    """Arguments of the model: tokens [b, s, ...] that may be padded at their end, and their mask [b, s]."""

    tokens: str
    mask: str


@dataclass(frozen=True)
class Plan:
    """How one model class is run context-parallel.

    Paths of modules may hold one `*` for each module of a list or dict; "-1" is a list's last.

    Attributes:
        blocks: for each list of blocks, in the order of the forward: its arguments that hold tokens. What is whole
            (has the global length) is split, what is a shard already stays; a length of 1 that broadcasts stays.
            "blocks[a:b]" names some of a list; a bound may be an attribute of the model, or minus one.
        gather: modules whose output is made whole ("blocks.-1": the last). A tuple gives an entry for each output.
        inputs: arguments of the model itself that are split before its forward.
        arguments: of other modules that take tokens (a norm behind the blocks): as of a block.
        split_outputs: modules whose output is split, in front of the blocks.
        whole: modules within the blocks, or between them, that run on all tokens, on every rank.
        halos: convolutions within the blocks that see neighbouring rows, the dim of their input in which rows lie, and
            their stream.
        attention: modules and the streams that attend to each other there; LOCAL for those on replicated keys. A key
            is a module's name within a block, with or without the list, spelt as in `blocks`, before it (`*` allowed);
            the list alone means the blocks' own forward.
            A tuple of several `Attention`s, and LOCAL: for a module that makes several attention calls, told apart by
            their tokens (calls with LOCAL: by comparing keys between ranks, which cannot be compiled). Not listed: all
            streams.
        main: the stream that must have a token on each rank, "image" if it is called so; others may be shorter than
            the group.
        needed: other streams that must, if they have any: the class' own code cannot deal with none on a rank.
        leading: masks [b, s] among the model's arguments that must keep the first tokens of a sample, and why.
        pads: texts that are padded to a token for each rank, because the class' own code cannot deal with none.
        unused: parameters (`*` allowed) that get no gradient, ever or with some inputs: DDP is told to look for them.
        required: arguments of the model that must be given, and why.
        refused: arguments of the model or of a block ("argument.key": an entry of a dict, or an attribute) that must be
            left out, and why.
        refused_backends: diffusers' attention backends that the class treats in a way of its own, and why.
        variants: other plans, by an entry of the model's config and its value.
    """

    blocks: Mapping[str, Mapping[str, Spec]]
    gather: Mapping[str, Spec]
    inputs: Mapping[str, Spec] = field(default_factory=dict)
    arguments: Mapping[str, Mapping[str, Spec]] = field(default_factory=dict)
    split_outputs: Mapping[str, Spec] = field(default_factory=dict)
    whole: Mapping[str, Whole] = field(default_factory=dict)
    halos: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    attention: Mapping[str, Streams | Attention | tuple[Attention | Streams, ...]] = field(default_factory=dict)
    main: str = "image"
    needed: Streams = ()
    leading: Mapping[str, str] = field(default_factory=dict)
    pads: tuple[Pad, ...] = ()
    unused: tuple[str, ...] = ()
    required: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    refused_backends: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[tuple[str, object], Plan] = field(default_factory=dict)

    @property
    def streams(self) -> Streams:
        """All streams of the plan, main first."""
        return tuple(dict.fromkeys((self.main, *self.held_streams)))

    @property
    def held_streams(self) -> Streams:
        """The streams that tensors of the plan hold, in the order in which it names them."""
        found: list[str] = []
        for specs in (self.inputs, self.split_outputs, *self.blocks.values()):
            for spec in specs.values():
                found += _streams(spec)
        return tuple(dict.fromkeys(found))


def _streams(spec: Spec | None) -> list[str]:
    if spec is None:
        return []
    if isinstance(spec, Kept):
        return []
    if isinstance(spec, Rows):
        return [spec.stream]
    if isinstance(spec, (Split, Mask, Count)):
        return list(spec.streams)
    entries = spec.values() if isinstance(spec, Mapping) else spec
    return [stream for entry in entries for stream in _streams(entry)]
