"""How many queries and keys each rank has, for plans that do not say what attends to what."""

from __future__ import annotations

import torch

from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.engine.session import Call, Session

Sizes = tuple[list[int], list[int]]  # of queries and of keys, by rank


def find_sizes(session: Session, queries: int, keys: int) -> Sizes | None:
    """Every rank's queries and keys, from this rank's, for plans that do not say; None where keys are whole everywhere.

    In the first forward of some lengths ranks tell each other, so that all see the same whatever they hold; later ones
    know it from the lengths, unless those left a choice. A pair of empty lists: attention shall ask itself.
    """
    call = session.current()
    if not call.lengths:  # nothing was split so far
        return None
    size, rank = call.groups.context_size, call.groups.context_rank
    shares, key = candidates(call), call.key()
    options = shares + [[n] * size for n in sorted(call.whole) if [n] * size not in shares]
    if torch.compiler.is_compiling() or call.groups.context is None or session.settled.get(key):
        sizes = (_only(options, rank, queries), _only(options, rank, keys))
    else:
        everyone = all_gather_ints([queries, keys], group=call.groups.context)
        sizes = ([q for q, _ in everyone], [k for _, k in everyone])
        if all(_only(options, r, pair[i]) == sizes[i] for r, pair in enumerate(everyone) for i in range(2)):
            call.met.append(key)
        else:
            session.settled[key] = False
    if sizes[1] and sizes[1] not in shares and sizes[1] in options:
        return None
    return sizes if sizes[0] and sizes[1] else ([], [])


def candidates(call: Call) -> list[list[int]]:
    """What each rank may hold of the split tensors: each alone, and two joined."""
    streams, found = list(call.lengths), []
    for i, first in enumerate(streams):
        for chosen in [(first,), *((first, second) for second in streams[i:])]:
            vector = call.sizes(chosen)
            if vector not in found:
                found.append(vector)
    return found


def _only(options: list[list[int]], rank: int, own: int) -> list[int]:
    """The one option in which `rank` holds `own` tokens; empty where there is none, or several."""
    fitting = [option for option in options if option[rank] == own]
    return fitting[0] if len(fitting) == 1 else []
