"""Plans: data that says which tensors of a model are split, which are gathered and which stay as they are.

Tokens belong to *modalities* ("image", "text"). Each modality is split into contiguous shards, one per rank of the
context group. A dim of a tensor holds one modality, or several modalities concatenated (`[text | image]`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union

Modalities = tuple[str, ...]

LOCAL: Modalities = ()
"""Modalities of attention that stays on its rank: its keys are whole there (cross-attention on replicated text)."""


@dataclass(frozen=True)
class Split:
    """A tensor with tokens along one dim; or a `slice` of the tokens of one modality.

    Attributes:
        dim: dim that holds the tokens.
        modalities: modalities along this dim, in order.
        ndim: split only tensors with this number of dims, or one of these numbers; others stay whole.
        local: modalities that are already sharded in this tensor; the other modalities may be whole.
        folded: the dim holds [batch x tokens], tokens innermost.
    """

    dim: int
    modalities: Modalities
    ndim: int | tuple[int, ...] | None = None
    local: Modalities = ()
    folded: bool = False

    def is_for(self, ndim: int) -> bool:
        """Return True if tensors with so many dims are split."""
        return self.ndim is None or ndim in (self.ndim if isinstance(self.ndim, tuple) else (self.ndim,))


@dataclass(frozen=True)
class Mask:
    """An attention mask over `modalities`: a key mask [b, s] or [..., 1, s], or a full mask [..., s, s]."""

    modalities: Modalities


@dataclass(frozen=True)
class Count:
    """A global token count (int), summed over `modalities`; replaced by the local count on each rank."""

    modalities: Modalities


@dataclass(frozen=True)
class Rows:
    """Number of rows (of an image) or frames of a modality, which is then split between rows only.

    List it before the modality's tensors. An int argument is replaced by the number of rows on this rank. For a tensor
    argument, the number of rows is read from its shape, and the tensor stays whole.

    Attributes:
        modality: modality that is split between rows.
        dim: dim of the tensor with the rows.
        per: config entry that divides the size of `dim` (a patch size; the first one if there are several).
    """

    modality: str
    dim: int = 0
    per: str = ""


@dataclass(frozen=True)
class Kept:
    """An argument that the engine reads. The block gets None in its place, unless it is `passed`."""

    name: str
    passed: bool = False


def split(
    dim: int, *modalities: str, ndim: int | tuple[int, ...] | None = None, local: Modalities = (), folded: bool = False
) -> Split:
    """Short form of `Split(dim, modalities)`, for the tables of plans."""
    return Split(dim, modalities, ndim, local, folded)


def mask(*modalities: str) -> Mask:
    """Short form of `Mask(modalities)`."""
    return Mask(modalities)


def count(*modalities: str) -> Count:
    """Short form of `Count(modalities)`."""
    return Count(modalities)


def rows(modality: str, dim: int = 0, per: str = "") -> Rows:
    """Short form of `Rows(modality, dim, per)`."""
    return Rows(modality, dim, per)


def kept(name: str, *, passed: bool = False) -> Kept:
    """Short form of `Kept(name, passed)`."""
    return Kept(name, passed)


# A leaf describes one tensor or every tensor of a list. A tuple has an entry per element; a dict, for some of the keys.
Leaf = Split | Mask | Count | Rows | Kept
Spec = Union[Leaf, tuple["Spec | None", ...], Mapping[str, "Spec"]]  # noqa: UP007 -- refers to itself


@dataclass(frozen=True)
class Attention:
    """Modalities of queries and keys in a module's attention, and the layout of its mask.

    Attributes:
        queries: modalities of the queries, in the order in which the module concatenates them. (Block masks need it.)
        keys: modalities of the keys, in this order; None: the modalities of the queries.
        mask: layout of the mask at the attention call.
            "given": the layout that `context_parallel_attention` takes.
            "padded": like "given", but the model's own code has appended columns, because the mask has more columns
            than there are local keys; they are dropped.
            "keys": made from local tokens and equal for all queries, so the part of one query is a key mask.
            "outer": made from local tokens: the outer product of per-token values >= 0.
        ragged: the model's own code drops padding tokens before attention, so ranks exchange the number of remaining
            tokens at every call.
        cached: keys of tokens of earlier forwards, which each rank has kept for its own shard, may be put before the
            keys. Ranks then exchange the number of keys, and there must be no mask. "block_causal": forwards without
            segments have kept keys of the tokens that preceded theirs, and may have a key mask over all of them.
            The name of a kept argument, a `KeyCache` or None: attention takes the keys that this cache has, the number
            of keys on each rank is known from it, and there may be a mask: a block mask over all keys in the order
            of time, or what the cache's `query_mask` and `block_mask` return.
        form: "softmax"; "linear": attention without softmax (`engine/attention/linear.py`); "block_causal":
            `engine/attention/segments.py`.
        replaces_processors: names of the attention processors that a form other than "softmax" replaces.
        log_base: name of a kept argument, a number of tokens. If it is given, the softmax scale is multiplied by
            sqrt(log(s) / log(log_base)), where s is the number of queries on all ranks.
        ordered: False: the order of the modalities is not known. (Modules that the plan does not list.)
    """

    queries: Modalities
    keys: Modalities | None = None
    mask: Literal["given", "padded", "keys", "outer"] = "given"
    ragged: bool = False
    cached: bool | str = False
    form: Literal["softmax", "linear", "block_causal"] = "softmax"
    replaces_processors: tuple[str, ...] = ()
    log_base: str = ""
    ordered: bool = True


@dataclass(frozen=True)
class Whole:
    """A module that needs all tokens: its arguments are gathered before it, and its output is split.

    Attributes:
        arguments: arguments with tokens, which are gathered.
        output: spec by which the output is split. None: it stays whole, and the sharded region ends here.
        only: class name; modules of other classes at these paths are left unchanged.
    """

    arguments: Mapping[str, Spec]
    output: Spec | None = None
    only: str = ""


@dataclass(frozen=True)
class Pad:
    """Names of two arguments of the model: tokens [b, s, ...] that may be padded at the end, and their mask [b, s]."""

    tokens: str
    mask: str


@dataclass(frozen=True)
class Patches:
    """Settings of a model that is computed in patches of its tokens (`pipelines/pipefusion`).

    Attributes:
        order: order of the modalities' tokens in attention over several of them.
        stages: False: the model needs outputs or weights of other blocks than the one before a block, so all blocks
            run on every rank.
        samples: False: arguments cannot be divided by samples, so stages compute a batch whole, and `cfg` above 1 is
            refused for pipelines that compute the branches of guidance in one batch.
        once: modules before the blocks that get whole tokens (`*` allowed; those that a model lacks are ignored). They
            run once for all patches, because the arguments of the model are the same.
        masks: arguments with the number of tokens that the blocks get, for models that drop padding. Stages then
            receive tensors of this size.
        alternate: the lists of blocks take turns in the forward.
        multiple: for models that get lists of samples: each is padded to a multiple of so many tokens, and all to the
            longest of the call.
        overlaps: False: before its blocks, the model mixes tokens of all patches (a refiner of image tokens, for
            example), so a patch of a step needs all patches of the step before.
    """

    order: Modalities
    stages: bool = True
    samples: bool = True
    once: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    alternate: bool = False
    multiple: int | None = None
    overlaps: bool = True


def patches(*order: str, **others: Any) -> Patches:
    """Short form of `Patches(order, …)`."""
    return Patches(order, **others)


@dataclass(frozen=True)
class Batch:
    """Arguments of a model's forward that do not simply hold the samples of a batch in dim 0.

    Attributes:
        marker: an argument by which a call is recognised: only models that have the same `Batch` have it.
        whole: arguments that are the same for all samples, or that the model uses for the first sample only.
        dims: the batch dim of tensors, if it is not 0.
        images: an argument with entries by the index of the sample, and one with a list of that many tensors for each.
        single: if the model has no batch dim: the reason why samples cannot be divided.
    """

    marker: str
    whole: tuple[str, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    images: tuple[str, str] | None = None
    single: str = ""


@dataclass(frozen=True)
class Plan:
    """Context-parallel rules for one model class.

    In a module path, `*` matches every module of a list or dict, and "-1" is the last module of a list.

    Attributes:
        blocks: lists of blocks, in forward order, each with the block arguments that hold tokens. An argument with the
            global length is split; a shard, or a broadcast length of 1, stays as it is. "blocks[a:b]" is a slice of a
            list; a bound may be an attribute of the model, or minus an attribute.
        gather: modules with outputs to all-gather ("blocks.-1": the last block). A tuple has an entry per output.
        inputs: arguments of the model that are split before its forward.
        arguments: arguments with tokens of modules outside the blocks (a norm after the blocks), handled like block
            arguments.
        split_outputs: modules before the blocks with outputs to split.
        whole: modules in or between the blocks that run on all tokens, on every rank.
        embeddings: convolutions before the blocks that embed each patch alone (stride = kernel size), and the modality
            of the patches. Each rank then embeds its own patches. The model may only move the output on its way to the
            blocks, with the tokens in the order of the patches; any other function of it gathers it first.
        halos: convolutions in the blocks that need neighbouring rows: (dim of the input with the rows, modality).
        attention: modalities that attend to each other, by module; LOCAL if the keys are replicated. A key is the
            module's path in a block, optionally after the list of blocks as spelt in `blocks` (`*` allowed); the list
            alone is the blocks' own forward. Modules that are not listed attend over all modalities. Modalities are in
            the order in which the module concatenates them: it is the order of block masks, unless `patches` has one.
            A tuple of `Attention`s and LOCAL is for a module with several attention calls. Calls are distinguished by
            their token counts; LOCAL calls by comparing keys between ranks, which cannot be compiled.
        main: modality that must have at least one token on each rank; other modalities may be shorter than the group.
        optional: modalities that are absent unless an argument defines their length before other tensors with them.
        needed: other modalities that, unless empty, must have a token on each rank, because the class's own code fails
            with zero tokens.
        leading: masks [b, s] among the model's arguments that must keep the first tokens of each sample, and the
            reason.
        pads: texts that are padded to one token per rank, because the class's own code fails with zero tokens.
        unused: parameters (`*` allowed) that get no gradient, always or for some inputs. They make DDP search for
            unused parameters.
        required: arguments of the model that must be given, and the reason.
        refused: arguments of the model or of a block that must be omitted, and the reason. "argument.key" is an entry
            of a dict or an attribute.
        keeps_keys: arguments of the model by which a forward keeps keys for later forwards, or uses them, and what is
            kept. All ranks must compute these forwards, so they are refused with `cfg`, stages or patches.
        refused_backends: attention backends of diffusers that the class handles in a special way, and the reason.
        patches: settings for computation in patches; None: the model does not support it.
        batch: arguments that hold samples in an unusual way; None: there are none.
        packed: arguments of the model with one value for each token, if a row can hold several samples: a time, a
            position and a sample number for each token. Empty: a row holds one sample.
        feed_forwards: paths in a block of your own modules that `mlp_tiles` computes in tiles: each token alone, from
            one argument to one tensor. Feed-forwards of diffusers are found without it.
        variants: other plans, by (config entry, value); or the reason why the class cannot be split with this value.
    """

    blocks: Mapping[str, Mapping[str, Spec]]
    gather: Mapping[str, Spec]
    inputs: Mapping[str, Spec] = field(default_factory=dict)
    arguments: Mapping[str, Mapping[str, Spec]] = field(default_factory=dict)
    split_outputs: Mapping[str, Spec] = field(default_factory=dict)
    whole: Mapping[str, Whole] = field(default_factory=dict)
    embeddings: Mapping[str, str] = field(default_factory=dict)
    halos: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    attention: Mapping[str, Modalities | Attention | tuple[Attention | Modalities, ...]] = field(default_factory=dict)
    main: str = "image"
    optional: Modalities = ()
    needed: Modalities = ()
    leading: Mapping[str, str] = field(default_factory=dict)
    pads: tuple[Pad, ...] = ()
    unused: tuple[str, ...] = ()
    required: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    keeps_keys: Mapping[str, str] = field(default_factory=dict)
    refused_backends: Mapping[str, str] = field(default_factory=dict)
    patches: Patches | None = None
    batch: Batch | None = None
    packed: tuple[str, ...] = ()
    feed_forwards: tuple[str, ...] = ()
    variants: Mapping[tuple[str, object], Plan | str] = field(default_factory=dict)

    def variant_for(self, config: object) -> Plan | str:
        """Return the plan for a model's config; or the reason why there is none."""
        for (setting, value), variant in self.variants.items():
            if getattr(config, setting, None) == value:
                return variant if isinstance(variant, str) else variant.variant_for(config)
        return self

    @property
    def modalities(self) -> Modalities:
        """Return all modalities of the plan, main first."""
        return tuple(dict.fromkeys((self.main, *self.held_modalities)))

    @property
    def held_modalities(self) -> Modalities:
        """Return the modalities in the plan's inputs, split outputs and blocks, in order of first appearance."""
        names: list[str] = []
        for specs in (self.inputs, self.split_outputs, *self.blocks.values()):
            for spec in specs.values():
                names += _modalities(spec)
        return tuple(dict.fromkeys(names))


def _modalities(spec: Spec | None) -> list[str]:
    if spec is None:
        return []
    if isinstance(spec, Kept):
        return []
    if isinstance(spec, Rows):
        return [spec.modality]
    if isinstance(spec, (Split, Mask, Count)):
        return list(spec.modalities)
    entries = spec.values() if isinstance(spec, Mapping) else spec
    return [modality for entry in entries for modality in _modalities(entry)]
