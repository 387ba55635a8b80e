"""Find the number of queries and keys on each rank, for plans that do not describe attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.transfer import all_gather_floats, all_gather_ints
from lightning_cp.engine.peers.checksum import norm_and_projections
from lightning_cp.engine.session import Call, Session
from lightning_cp.errors import InterceptionError

MOST_LENGTHS = 256  # number of lengths for which a session stores sizes
_TOLERANCE = 1e-3  # largest difference of equal keys, relative to their norm

Sizes = tuple[list[int], list[int]]  # numbers of queries and of keys, each in rank order


def find_sizes(session: Session, queries: int, keys: int) -> Sizes | None:
    """Find the number of queries and keys on each rank; None if nothing is split yet or the keys are whole.

    The first call with new lengths all-gathers the numbers. If each rank could derive all of them from its own, later
    calls do that without communication; otherwise they all-gather too. All ranks take the same decision, also if a
    forward fails on one of them: it depends on completed exchanges only, not on completed forwards.
    ([], []): ambiguous (possible in compiled code); attention then all-gathers the lengths.

    Args: queries, keys: number of tokens on this rank.
    """
    call = session.current()
    if not call.lengths:  # nothing was split so far
        return None
    size, rank = call.groups.context_size, call.groups.context_rank
    split, key, known = possible_sizes(call), (call.key(), queries, keys), session.derivable_sizes
    options = split + [[n] * size for n in sorted(call.unsplit_lengths) if [n] * size not in split]
    if torch.compiler.is_compiling() or call.groups.context is None or key in known:
        sizes = (_only(options, rank, queries), _only(options, rank, keys))
    else:
        by_rank = all_gather_ints([queries, keys], group=call.groups.context)
        sizes = ([q for q, _ in by_rank], [k for _, k in by_rank])
        if all(_only(options, r, pair[i]) == sizes[i] for r, pair in enumerate(by_rank) for i in range(2)):
            if len(known) >= MOST_LENGTHS:
                known.clear()
            known.add(key)
    if sizes[1] and sizes[1] not in split and sizes[1] in options:
        return None
    return sizes if sizes[0] and sizes[1] else ([], [])


def are_whole(contents: Sequence[Tensor], keys: int, group: dist.ProcessGroup | None) -> bool:
    """Return True if keys and values are equal on all ranks (number of keys, norms, projections): they are not split.

    Small differences (from kernels that are not bitwise reproducible) pass. Synchronises the host.

    Args: contents: keys and values. keys: number of keys on this rank.
    Ranks: all of the group. Raises: InterceptionError: called while the model is being compiled.
    """
    if group is None:
        return False  # nothing is split
    if torch.compiler.is_compiling():
        raise InterceptionError(
            "a module with LOCAL and other attention calls in its plan cannot be compiled, because only the contents "
            "of the keys distinguish the calls: do not compile this block, or make each call in a separate module"
        )
    sums = [x for tensor in contents for x in norm_and_projections(tensor, 1)]
    first, *others = all_gather_floats([keys, *sums], group=group)
    limits = [0.0, *(_TOLERANCE * first[1 + i // 2 * 2] for i in range(len(sums)))]  # relative to the norms
    return all(abs(a - b) <= limit for x in others for a, b, limit in zip(first, x, limits, strict=True))


def possible_sizes(call: Call) -> list[list[int]]:
    """List possible numbers of tokens on each rank: those of each split modality, and of each pair of modalities."""
    modalities, vectors = list(call.lengths), []
    for i, first in enumerate(modalities):
        for chosen in [(first,), *((first, second) for second in modalities[i:])]:
            vector = call.sizes(chosen)
            if vector not in vectors:
                vectors.append(vector)
    return vectors


def _only(options: list[list[int]], rank: int, tokens: int) -> list[int]:
    """Return the only option in which `rank` holds `tokens` tokens; empty if none or several fit."""
    fitting = [option for option in options if option[rank] == tokens]
    return fitting[0] if len(fitting) == 1 else []
