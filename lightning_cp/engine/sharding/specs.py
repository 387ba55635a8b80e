"""Apply specs: shard values to this rank's tokens, and gather them again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention.sparse.handles import is_block_mask
from lightning_cp.comm.shards import gather_shards, sizes_in
from lightning_cp.engine.peers.checksum import version_of
from lightning_cp.engine.session import Call, Session
from lightning_cp.engine.sharding.convolutions import LocalTokens, whole_embeddings
from lightning_cp.errors import PlanError
from lightning_cp.plans import Count, Kept, Leaf, Mask, Modalities, Rows, Spec, Split


def shard(
    value: Any, spec: Spec | None, *, name: str, session: Session, strict: bool, before: Sequence[str] = ()
) -> Any:
    """Shard `value` (a tensor, an int that counts tokens, or a nest of them) to this rank's tokens.

    A tensor of length 1 (for broadcasting) is returned unchanged, and so is one that has this rank's length, if other
    tokens of its modalities were split before: only then it can come from a split.

    Args:
        spec: dims and modalities of the tokens in `value`.
        name: name of the argument, for errors.
        strict: True inside the blocks: the first tensor of a modality always defines its length. False for the
            model's own arguments: if the modality is unknown and the spec gives `ndim`, a length of 1 is kept for
            broadcasting (a timestep may be given for each token or for each sample).
        before: modalities that were split before this module was called.
    Gradient: a slice; backward pads with zeros.
    Raises: PlanError: a length that is neither whole nor local. ShapeError: too few tokens.
    """

    def one(x: Any, spec: Leaf, name: str) -> Any:
        if isinstance(spec, Kept):
            session.current().kept[spec.name] = x
            return x if spec.passed else None
        if isinstance(spec, Rows) and isinstance(x, Tensor):
            session.current().rows[spec.modality] = x.shape[spec.dim] // session.model_plan.dividers.get(spec.per, 1)
            return x
        if isinstance(spec, (Count, Rows)):
            return _shard_count(x, spec, name=name, session=session)
        if isinstance(x, slice) and isinstance(spec, Split) and len(spec.modalities) == 1:
            return _shard_slice(x, spec.modalities, session.current())
        if isinstance(spec, Mask) and is_block_mask(x):
            return x  # of the whole sequence; attention selects this rank's part
        if isinstance(x, Tensor) and isinstance(spec, Mask):
            return _shard_mask(x, spec, name=name, session=session, before=before)
        if isinstance(x, LocalTokens) and isinstance(spec, Split):
            return _shard_anew(x, spec, name=name, session=session, strict=strict, before=before)
        if isinstance(x, Tensor) and isinstance(spec, Split):
            return _shard_tensor(x, spec, name=name, session=session, strict=strict, before=before)
        raise _undescribed(x, spec, name)

    return _each(value, spec, name, one)


def unshard(value: Any, spec: Spec | None, *, name: str, session: Session) -> Any:
    """Gather `value` (an output, or a nest of outputs) on every rank; the adjoint of `shard`.

    Gradient: reduce-scatter (sum). Raises: PlanError: an output with another number of tokens than this rank's.
    """

    def one(x: Any, spec: Leaf, name: str) -> Any:
        if isinstance(spec, Count):
            return sum(session.current().lengths[modality] for modality in spec.modalities)
        if isinstance(spec, Rows):
            return session.current().rows[spec.modality]
        if not (isinstance(spec, Split) and isinstance(x, Tensor)):
            raise _undescribed(x, spec, name)
        return _unshard_tensor(x, spec, name, session.current())

    return _each(value, spec, name, one)


def _each(value: Any, spec: Spec | None, name: str, one: Callable[[Any, Leaf, str], Any]) -> Any:
    """Apply `one` to each leaf of a nest with its spec; a single spec applies to all items of a list, tuple or dict."""
    if isinstance(spec, Kept):
        return one(value, spec, name)
    if value is None or spec is None:
        return value
    if isinstance(spec, Leaf):
        if isinstance(value, dict):
            return {key: _each(x, spec, name, one) for key, x in value.items()}
        if isinstance(value, (list, tuple)):
            return sequence_like(value, [_each(x, spec, name, one) for x in value])
        return one(value, spec, name)
    if isinstance(spec, Mapping) and isinstance(value, dict):
        return {key: _each(x, spec.get(key), f"{name}[{key!r}]", one) for key, x in value.items()}
    if isinstance(spec, tuple) and isinstance(value, (list, tuple)):
        if len(spec) != len(value):
            raise PlanError(f"{name} has {len(value)} elements, expected {len(spec)}, as in its plan")
        return sequence_like(value, [_each(x, s, name, one) for x, s in zip(value, spec, strict=True)])
    raise _undescribed(value, spec, name)


def _undescribed(value: Any, spec: Spec, name: str) -> PlanError:
    return PlanError(f"{name} is a {type(value).__name__}, which does not fit the {type(spec).__name__} in its plan")


def _shard_tensor(x: Tensor, spec: Split, *, name: str, session: Session, strict: bool, before: Sequence[str]) -> Any:
    """Shard a tensor. In sampling, all blocks of a forward that get one tensor (of positions, say) share its shard.

    Not with gradients, but for `shard_before_checkpoint`: a recomputation in backward, which starts anew, must repeat
    the operations of the forward. Not with one shard: the tokens of every block would be kept until the end of the
    forward.
    """
    call = session.current()
    is_alone = call.num_shards == 1 or (torch.is_grad_enabled() and not call.shares_shards)
    if is_alone or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return _shard_anew(x, spec, name=name, session=session, strict=strict, before=before)
    shards, key = call.shards, (id(x), id(spec), torch.is_grad_enabled())
    whole, version, cached, its_version = shards.get(key, _NONE)
    if cached is not None and whole() is x and (version, its_version) == (version_of(x), cached._version):
        return cached
    shard = _shard_anew(x, spec, name=name, session=session, strict=strict, before=before)
    if shard is not x and not shard.is_inference() and not x.is_inference():
        shards[key] = weakref.ref(x), version_of(x), shard, shard._version
    return shard


_NONE: tuple[Any, ...] = (None, 0, None, 0)


def _shard_anew(x: Any, spec: Split, *, name: str, session: Session, strict: bool, before: Sequence[str]) -> Any:
    call = session.current()
    if not spec.is_for(x.ndim):
        return x
    check_dim(x, spec, name)
    dim, n = spec.dim % x.ndim, x.shape[spec.dim]
    if n == 1 and not strict and spec.ndim is not None and not call.lengths.keys() >= set(spec.modalities):
        return x
    define_length(n, spec, name=name, session=session)
    rank, local = call.groups.context_rank, call.sizes(spec.modalities)[call.groups.context_rank]
    parts = [_local(call, s) if s in spec.local else call.division(s) for s in spec.modalities]
    ranks = [0 if s in spec.local else rank + 1 for s in spec.modalities]
    total = sum(map(sum, parts))
    if spec.folded and total and n % total == 0:
        batch = x.reshape(*x.shape[:dim], -1, total, *x.shape[dim + 1 :])
        return narrow(batch, dim + 1, parts, ranks).flatten(dim, dim + 1)
    if n == total:
        own = x.own(dim, parts[0][1:-1]) if isinstance(x, LocalTokens) else None
        return narrow(whole_embeddings(x, "the order of its tokens"), dim, parts, ranks) if own is None else own
    can_be_shard = all(modality in before for modality in spec.modalities if modality not in spec.local)
    if n == 1 or (can_be_shard and (n == local or (spec.folded and local and n % local == 0))):
        return x
    shown = f"neither all {total} of {' + '.join(spec.modalities)} nor this rank's {local}: the plan does not fit this"
    if not can_be_shard:
        shown = f"expected all {total} of {' + '.join(spec.modalities)}, which were not split before: pass the whole"
    raise PlanError(f"{name} has {n} tokens in dim {spec.dim}, {shown} input")


def _local(call: Call, modality: str) -> tuple[int, ...]:
    return (call.sizes_of(modality)[call.groups.context_rank],)


def define_length(n: int, spec: Split | Count, *, name: str, session: Session) -> None:
    """Define the length of a modality at its first tensor: `n` minus the lengths of the spec's other modalities."""
    call = session.current()
    unknown = [modality for modality in dict.fromkeys(spec.modalities) if modality not in call.lengths]
    if not unknown:
        return
    unknown = [modality for modality in unknown if modality not in session.model_plan.optional] or unknown
    rest = n - sum(call.lengths[modality] for modality in spec.modalities if modality in call.lengths)
    aside = isinstance(spec, Split) and (spec.local or spec.folded)
    if len(unknown) > 1 or spec.modalities.count(unknown[0]) > 1 or rest < 0 or aside:
        raise PlanError(
            f"{name} holds the modalities {spec.modalities}, but the lengths of {unknown} are unknown: split another "
            "tensor of these modalities before it"
        )
    everywhere = unknown[0] == session.model_plan.main or (unknown[0] in session.model_plan.needed and rest > 0)
    call.define(unknown[0], rest, everywhere=everywhere, name=name)


def _shard_count(n: Any, spec: Count | Rows, *, name: str, session: Session) -> int:
    if isinstance(n, bool) or not isinstance(n, int):
        raise _undescribed(n, spec, name)
    call = session.current()
    rank = call.groups.context_rank
    if isinstance(spec, Rows):
        call.rows[spec.modality] = n
        return call.row_division(spec.modality)[1:-1][rank]
    define_length(n, spec, name=name, session=session)
    whole = sum(call.lengths[modality] for modality in spec.modalities)
    if n != whole:
        raise PlanError(
            f"{name} is {n}, expected {whole}, the number of {' + '.join(spec.modalities)} tokens: the plan does not "
            "fit this input"
        )
    return call.sizes(spec.modalities)[rank]


def _shard_slice(x: slice, modalities: Modalities, call: Call) -> slice:
    (tokens,) = call.ranges(modalities)[call.groups.context_rank]
    start, stop, step = x.indices(call.lengths[modalities[0]])
    assert step == 1, "models slice consecutive tokens"
    return slice(*(min(max(n - tokens.start, 0), len(tokens)) for n in (start, stop)))


def _shard_mask(x: Tensor, spec: Mask, *, name: str, session: Session, before: Sequence[str]) -> Any:
    """Shard an attention mask.

    A key mask ([b, s] or [..., 1, s]) is sharded like its tokens. A query mask ([..., s, s]) is sharded to this rank's
    queries, and its columns are reordered to the keys' order by rank.
    """
    if x.ndim == 2 or (x.ndim in (3, 4) and x.shape[-2] == 1):
        own = Split(-1, spec.modalities)
        return _shard_tensor(x, own, name=name, session=session, strict=True, before=before)
    call = session.current()
    missing = [modality for modality in spec.modalities if modality not in call.lengths]
    if missing or x.ndim not in (3, 4):
        raise PlanError(
            f"{name} has shape {tuple(x.shape)}: a mask over {spec.modalities} is [b, s], [..., 1, s] or [..., s, s]"
            + (
                f"; the lengths of {missing} are unknown: split a tensor of these modalities before it"
                if missing
                else ""
            )
        )
    rank, whole = call.groups.context_rank, sum(call.lengths[modality] for modality in spec.modalities)
    local = call.sizes(spec.modalities)[rank]
    can_be_shard = all(modality in before for modality in spec.modalities)
    if x.shape[-1] != whole or x.shape[-2] not in ((whole, local) if can_be_shard else (whole,)):
        raise PlanError(
            f"{name} has shape {tuple(x.shape)}, but {' + '.join(spec.modalities)} have {whole} tokens: the plan does "
            "not fit this input"
        )
    if x.shape[-2] != whole:
        return x
    query_mask = narrow(
        x, x.ndim - 2, [call.division(modality) for modality in spec.modalities], [rank + 1] * len(spec.modalities)
    )
    if call.evaluation is not None:  # buffered keys are in the order of the sequence
        call.evaluation.check_order(spec.modalities, name)
        return query_mask
    return query_mask if len(spec.modalities) == 1 else query_mask[..., _order_of_keys(call, spec)]


def _order_of_keys(call: Call, spec: Mask) -> list[int]:
    """List the global positions of all keys in rank order: the first rank's keys, then the next rank's, ..."""
    order: list[int] = []
    for rank in range(call.groups.context_size):
        start = 0
        for modality in spec.modalities:
            sizes = call.sizes_of(modality)
            first = start + sum(sizes[:rank])
            order += range(first, first + sizes[rank])
            start += call.lengths[modality]
    return order


def check_dim(x: Tensor, spec: Split, name: str) -> None:
    """Check that the tensor has the spec's dim. Raises: PlanError: it does not."""
    if not -x.ndim <= spec.dim < x.ndim:
        raise PlanError(
            f"{name} is split in dim {spec.dim}, but has shape {tuple(x.shape)}: set expected_dims, or fix split_dim"
        )


def narrow(x: Tensor, dim: int, segments: Sequence[Sequence[int]], chosen: Sequence[int]) -> Tensor:
    """Concatenate one slice of each segment of `x`. Gradient: backward pads with zeros.

    Args: segments: for each segment, the number of tokens of each slice. chosen: for each segment, the slice to take.
    """
    pieces, start = [], 0
    for sizes, index in zip(segments, chosen, strict=True):
        pieces.append(x.narrow(dim, start + sum(sizes[:index]), sizes[index]))
        start += sum(sizes)
    if len(pieces) > 1:
        return torch.cat(pieces, dim)
    # Contiguous, with the strides of a new tensor also in dims of length 1: torch.compile guards on them.
    return pieces[0].clone(memory_format=torch.contiguous_format)


def _unshard_tensor(x: Tensor, spec: Split, name: str, call: Call) -> Tensor:
    if not spec.is_for(x.ndim):
        return x
    check_dim(x, spec, name)
    expected = call.sizes(spec.modalities)[call.groups.context_rank]
    if x.shape[spec.dim] != expected:
        raise PlanError(
            f"{name} has {x.shape[spec.dim]} tokens in dim {spec.dim}, expected this rank's {expected} of "
            f"{' + '.join(spec.modalities)}"
        )
    dim = spec.dim % x.ndim
    sizes = [n for s in spec.modalities for n in call.sizes_of(s)]
    gathered = gather_shards(x, dim, sizes, call.groups.name)
    if call.evaluation is None:
        return gathered
    parts = [call.division(modality) for modality in spec.modalities]
    return call.evaluation.put_output(gathered, dim, [(sum(n[1:-1]), n[0], n[-1]) for n in parts])


def sequence_like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> list[Any] | tuple[Any, ...]:
    """Return `items` as a list or a tuple: the type of `value`."""
    return items if isinstance(value, list) else tuple(items)


def shard_unconditionally(value: Any, spec: Spec | None, *, name: str, session: Session) -> Any:
    """Shard as in diffusers' plans: every tensor is split, and its length serves as its modality's name."""
    if value is None or spec is None:
        return value
    if isinstance(spec, tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(spec):
            raise PlanError(
                f"{name} has {len(spec)} entries in the plan, but is a {type(value).__name__} of another length"
            )
        pairs = zip(value, spec)
        return sequence_like(value, [shard_unconditionally(x, s, name=name, session=session) for x, s in pairs])
    if not (isinstance(spec, Split) and isinstance(value, Tensor)):
        raise _undescribed(value, spec, name)
    if not spec.is_for(value.ndim):
        return value
    check_dim(value, spec, name)
    call, n = session.current(), value.shape[spec.dim]
    call.define(str(int(n)), n, everywhere=False, name=name)
    sizes = sizes_in(call.groups, n)
    return narrow(value, spec.dim % value.ndim, [sizes], [call.groups.context_rank])
