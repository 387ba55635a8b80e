"""One attention call: settings, checks of its tensors, and the exchange of lengths between ranks."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.attention.heads import assign_heads, head_shares
from lightning_cp.attention.keys import Ring, Row
from lightning_cp.attention.sparse.local import LocalMask
from lightning_cp.attention.sparse.mask import SparseMask
from lightning_cp.attention.ulysses import Ulysses
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.config import ContextParallelConfig
from lightning_cp.errors import PeerMismatchError, ShapeError
from lightning_cp.kernels import choose_kernel
from lightning_cp.mesh.groups import MeshGroups

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool)


class Settings(NamedTuple):
    """Settings of one attention call, other than its tensors and lengths: the last arguments of the operators.

    Attributes:
        groups: `MeshGroups.name`.
        kernel: one of `kernels.KERNEL_NAMES`.
        grouped: True: there may be fewer key heads than query heads.
        others: see `Ring`.
    """

    causal: bool
    scale: float
    groups: str
    kernel: str
    rotate_method: str
    accumulate_fp32: bool
    grouped: bool


def settings_of(
    head_dim: int,
    *,
    causal: bool,
    scale: float | None,
    groups: str,
    config: ContextParallelConfig,
    kernel: str = "auto",
    grouped: bool = True,
) -> Settings:
    """Return the settings of a call. Args: scale: factor on the scores; None: head_dim ** -0.5."""
    scale = max(head_dim, 1) ** -0.5 if scale is None else float(scale)
    return Settings(causal, scale, groups, kernel, config.rotate_method, config.convert_to_fp32, grouped)


@dataclass(frozen=True)
class Lengths:
    """Number of tokens on each rank of the context group, in rank order, and the kind of mask.

    Attributes:
        query, key: number of queries and of keys on each rank.
        mask_kind: "key_mask", "query_mask" or "" (see `Ring`).
        mask_query_sizes: size of the query dim of each rank's mask.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    mask_kind: str = ""
    mask_query_sizes: tuple[int, ...] = ()


def four_dims(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """Return a mask [batch, keys_local] of the local keys with four dims; any other mask as it is."""
    return mask[:, None, None, :] if mask is not None and mask.ndim == 2 and mask.shape == key.shape[:2] else mask


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    groups: MeshGroups,
    settings: Settings,
    has_block_mask: bool = False,
) -> None:
    """Check shapes, dtypes, mask and kernel of a call. Raises: ShapeError, KernelError."""
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ShapeError(f"{shapes}: each must be [batch, seq_local, heads, head_dim]")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES[:4]:
        raise ShapeError(
            f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: query, key and value must have the same dtype, one of "
            f"{_DTYPES[:4]}"
        )
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape != v.shape or q.shape[3] != k.shape[3]:
        raise ShapeError(f"{shapes}: batch and head_dim must be equal, and key and value must have the same shape")
    hq, hk, ulysses = q.shape[2], k.shape[2], groups.context_shape[1]
    if hq != hk and not settings.grouped:
        raise ShapeError(f"{shapes}: {hq} query heads but {hk} key heads: pass enable_gqa=True to group them")
    if hk == 0 or hq % hk:
        raise ShapeError(f"{shapes}: the number of key heads, {hk}, must divide the number of query heads, {hq}")
    if not q.shape[3]:
        raise ShapeError(f"{shapes}: head_dim must be at least 1")
    if hq < ulysses:
        raise ShapeError(
            f"ulysses_degree={ulysses} must be at most the number of query heads, {hq}: use ring_degree for more ranks"
        )
    if mask is not None:
        if mask.ndim != 4 or mask.shape[0] not in (1, q.shape[0]) or mask.shape[1] not in (1, hq):
            raise ShapeError(f"attn_mask {tuple(mask.shape)} does not fit {shapes}: {_MASKS}")
        if mask.dtype not in _DTYPES:
            raise ShapeError(
                f"attn_mask has dtype {mask.dtype}: it must be bool (True = attend) or floating-point (added to the "
                "scores)"
            )
        if mask.requires_grad:
            raise ShapeError("attn_mask requires grad, but its gradient is not computed: detach it")
    if has_block_mask and (mask is not None or settings.causal):
        other = "is_causal=True" if mask is None else "attn_mask"
        raise ShapeError(f"block_mask and {other} cannot be used together: let mask_mod decide both")
    choose_kernel(settings.kernel, q, q.new_ones(1, 1, 1, 1) if has_block_mask else mask)


_MASKS = (
    "a mask must be [batch, keys_local] or [batch or 1, heads or 1, 1, keys_local] (a mask of the local keys), or "
    "[batch or 1, heads or 1, queries_local or 1, keys_of_all_ranks] (a mask of the local queries over all keys)"
)


_SIGNATURE = 18  # ints that describe a rank's call; all zero: the rank rejected its arguments


def report_refusal(groups: MeshGroups) -> None:
    """Send an invalid signature to peers that exchange lengths, so that they raise too. Ranks: the context group."""
    if groups.context is not None:
        all_gather_ints([0] * _SIGNATURE, group=groups.context)


def exchange_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    q_lengths: list[int],
    kv_lengths: list[int],
    groups: MeshGroups,
    settings: Settings,
    sparse: SparseMask | None = None,
    compare: bool = False,
) -> Lengths:
    """Return the lengths of all ranks and the kind of mask; all-gather them if the arguments do not determine both.

    Args:
        q_lengths, kv_lengths: number of queries and of keys on each rank of the context group; empty: unknown.
        compare: compare the calls of all ranks in any case.
    Ranks: all of `groups.context` if they exchange, that is, if they compare, if lengths are missing, or if the
        lengths leave the kind of mask open on some rank.
    Raises: ShapeError on a rank with invalid arguments; PeerMismatchError on the other ranks if they exchange.
    """

    def check() -> None:
        check_tensors(q, k, v, mask, groups=groups, settings=settings, has_block_mask=sparse is not None)
        _check_lengths("q_lengths", q_lengths, q.shape[1], groups)
        _check_lengths("kv_lengths", kv_lengths, k.shape[1], groups)

    is_known = are_known(q_lengths, kv_lengths, mask, groups)
    signatures = []
    if compare or not is_known:
        given = zlib.crc32(repr((q_lengths, kv_lengths)).encode()) if is_known else 0
        signatures = _compare_calls(
            q, k, mask, check=check, groups=groups, settings=settings, sparse=sparse, given=given
        )
    else:
        check()
    if is_known:
        query, key = tuple(q_lengths or q.shape[1:2]), tuple(kv_lengths or k.shape[1:2])
    else:
        query, key = (tuple(other[i] for other in signatures) for i in (1, 2))
    by_rank = {rank: (x[3], x[4]) for rank, x in enumerate(signatures)}
    if all(x == signatures[0] for x in signatures):
        by_rank = {}  # one mask says it for all; in a dry run, the others answer as this rank, whatever their lengths
    sizes = {} if mask is None else by_rank or {groups.context_rank: (mask.shape[2], mask.shape[3])}
    lengths = _lengths_of(query, key, sizes)
    if sparse is not None:
        sparse.check_shapes(q.shape[0], q.shape[2], sum(lengths.query), sum(lengths.key))
    is_uneven = lengths.query != lengths.key or groups.row is not None
    if settings.causal and mask is None and is_uneven:  # some chunk needs a causal mask tensor
        choose_kernel(settings.kernel, q, q.new_ones(1, 1, 1, 1))
    return lengths


def are_known(q_lengths: list[int], kv_lengths: list[int], mask: Tensor | None, groups: MeshGroups) -> bool:
    """Return True if the arguments determine the lengths of all ranks and the kind of mask: nothing is exchanged."""
    has_lengths = bool(q_lengths) and bool(kv_lengths)
    return groups.context_size == 1 or (has_lengths and (mask is None or not _is_ambiguous(q_lengths, kv_lengths)))


def _check_lengths(name: str, lengths: list[int], local: int, groups: MeshGroups) -> None:
    rank, size = groups.context_rank, groups.context_size
    if lengths and (len(lengths) != size or min(lengths) < 0 or lengths[rank] != local):
        raise ShapeError(
            f"{name}={lengths} is not valid: it must hold one length for each of the {size} ranks of the context "
            f"group, and {local} for this one (rank {rank})"
        )


def _is_ambiguous(q_lengths: list[int], kv_lengths: list[int]) -> bool:
    """Return True if ranks may infer different kinds of mask: one rank holds all keys, or a single query."""
    return sum(kv_lengths) in kv_lengths or 1 in q_lengths


def _possible_mask_kinds(mask_q: int, mask_k: int, own_q: int, own_k: int, all_k: int) -> list[str]:
    kinds = ["key_mask"] if mask_q == 1 and mask_k == own_k else []
    return [*kinds, "query_mask"] if mask_k == all_k and mask_q in (1, own_q) else kinds


def _compare_calls(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    *,
    check: Callable[[], None],
    groups: MeshGroups,
    settings: Settings,
    sparse: SparseMask | None,
    given: int,
) -> list[list[int]]:
    """All-gather shapes, and a flag for valid arguments, so that bad input on one rank raises on all ranks.

    Args: given: checksum of the lengths that were passed to the call. Returns: the signature of each rank's call.
    """
    refused: ValueError | None = None
    try:
        check()
        scale_bits = struct.unpack("<q", struct.pack("<d", settings.scale))[0]
        shape = [q.shape[0], *q.shape[2:], k.shape[2], _DTYPES.index(q.dtype), int(settings.causal), scale_bits]
        layout = (groups.shares, groups.context_shape, groups.columns, settings.rotate_method)
        shape += [zlib.crc32(repr(layout).encode()), given]
        shape += [-1 if sparse is None else sparse.checksum]
        mask_shape = [-1] * 5 if mask is None else [*mask.shape[:2], _DTYPES.index(mask.dtype), *mask.shape[2:]]
        signature = [1, q.shape[1], k.shape[1], *mask_shape[3:], *mask_shape[:3], *shape]
    except ValueError as error:
        refused, signature = error, [0] * _SIGNATURE
    assert groups.context is not None, "only several ranks exchange lengths"
    signatures = all_gather_ints(signature, group=groups.context)
    if refused is not None:
        raise refused
    failed = [rank for rank, other in enumerate(signatures) if not other[0]]
    if failed:
        raise PeerMismatchError(
            f"rank(s) {failed} of the context group got invalid arguments: see their error messages"
        )
    block_masks = [other[-1] for other in signatures]
    if len(set(block_masks)) > 1:
        raise PeerMismatchError(
            f"block_mask differs between the ranks of a context group (checksums {block_masks}; -1: no block_mask): "
            "pass the mask of the whole sequence, the same on all ranks"
        )
    if any(other[5:] != signature[5:] for other in signatures):
        listing = "; ".join(f"rank {rank}: {other[5:-1]}" for rank, other in enumerate(signatures))
        raise PeerMismatchError(
            "ranks of one context group called attention differently (mask batch, mask heads, mask dtype, batch, query "
            "heads, head size, key heads, dtype, causal, bits of scale, checksum of shares, grid, degrees and "
            f"rotate_method, of the lengths given): {listing}"
        )
    return signatures


def _lengths_of(query: tuple[int, ...], key: tuple[int, ...], masks: Mapping[int, tuple[int, int]]) -> Lengths:
    """Return lengths with the kind of mask. Args: masks: (queries, keys) of each rank's mask that is known, by rank."""
    if not masks:
        return Lengths(query, key, "", (0,) * len(query))
    options = [_possible_mask_kinds(*size, query[rank], key[rank], sum(key)) for rank, size in masks.items()]
    kind = next((kind for kind in ("key_mask", "query_mask") if all(kind in option for option in options)), None)
    if kind is None:
        raise ShapeError(
            f"attn_mask sizes (queries, keys) by rank {dict(masks)} do not fit q_lengths={query}, kv_lengths={key}: "
            f"{_MASKS}"
        )
    queries = tuple(size[0] for size in masks.values())
    if len(masks) < len(query):  # the lengths determine the sizes of the other ranks' masks
        queries = (1,) * len(query) if kind == "key_mask" or queries[0] == 1 else query
    return Lengths(query, key, kind, queries)


def ring_of(
    lengths: Lengths,
    *,
    groups: MeshGroups,
    settings: Settings,
    sparse: SparseMask | None = None,
    heads: slice = slice(None),
    device: torch.device | None = None,
) -> Ring:
    """Return the ring settings of a call. A chunk of the ring is all tokens of one Ulysses group.

    On a grid, the ring is this rank's column.

    Args: heads, device: this rank's query heads, and the device of attention, for the mask `sparse`.
    """
    ulysses, columns = groups.context_shape[1], groups.columns
    row, column = divmod(groups.ring_rank, columns)

    def chunks(local: tuple[int, ...], size: int = ulysses) -> tuple[int, ...]:
        return tuple(sum(local[i : i + size]) for i in range(0, len(local), size))

    queries, keys = chunks(lengths.query), chunks(lengths.key)
    rows, ends = chunks(queries, columns), [*accumulate(keys)]
    places = [range(end - length, end) for end, length in zip(ends, keys, strict=True)]
    mask = None
    if sparse is not None:
        assert device is not None, "masks are evaluated for a device"
        of_column = slice(column, None, columns)
        mask = LocalMask(sparse, rows, keys, rank=row, heads=heads, device=device, column=of_column)
    return Ring(
        group=groups.ring if columns == 1 else groups.column,
        q_start=sum(rows[:row]),
        kv_lengths=keys[column::columns],
        mask_kind=lengths.mask_kind if mask is None else "query_mask",
        causal=settings.causal,
        scale=settings.scale,
        kernel=settings.kernel,
        rotate_method=settings.rotate_method,
        accumulate_fp32=settings.accumulate_fp32,
        sparse=mask,
        row=_row_of(lengths, queries, places, groups=groups),
        kv_starts=() if columns == 1 else tuple(x.start for x in places[column::columns]),
    )


def _row_of(lengths: Lengths, queries: tuple[int, ...], keys: list[range], *, groups: MeshGroups) -> Row | None:
    """Return the settings of a row of a grid. Args: queries, keys: number and positions on each rank of the ring."""
    if groups.row is None:
        return None
    columns, ulysses = groups.columns, groups.context_shape[1]
    first = groups.ring_rank // columns * columns
    of_row = slice(first, first + columns)
    mask_queries = lengths.mask_query_sizes if ulysses == 1 else queries  # Ulysses expands masks to all queries
    by_column = tuple(tuple(keys[column::columns]) for column in range(columns))
    return Row(groups.row, queries[of_row], mask_queries[of_row], by_column)


def ulysses_of(lengths: Lengths, hq: int, hk: int, *, groups: MeshGroups) -> Ulysses | None:
    """Return the Ulysses settings of a call; None for degree 1."""
    if groups.ulysses is None:
        return None
    degree = groups.context_shape[1]
    local = slice(groups.ring_rank * degree, (groups.ring_rank + 1) * degree)
    return Ulysses(
        group=groups.ulysses,
        rank=groups.ulysses_rank,
        heads_by_rank=tuple(assign_heads(hq, hk, degree, head_shares(groups))),
        q_lengths=lengths.query[local],
        kv_lengths=lengths.key[local],
        mask_kind=lengths.mask_kind,
        mask_query_sizes=lengths.mask_query_sizes[local],
    )
