"""Where intercepted attention calls arrive: diffusers' dispatcher and PyTorch's function, context-parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.attention import attend_across
from lightning_cp.comm.shards import gather
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.engine.session import Call, Session
from lightning_cp.errors import InterceptionError, PlanError
from lightning_cp.kernels import kernel_of_backend
from lightning_cp.plans import Attention, Streams

Sizes = tuple[list[int], list[int]]  # of queries and of keys, by rank


@dataclass(eq=False)
class Entry:
    """Attention of a session; `kind` None: found out from the lengths (diffusers-format plans)."""

    session: Session
    kind: Attention | None
    original: Callable[..., Tensor] | None = None  # diffusers' dispatcher, where the model is one of diffusers'

    def __deepcopy__(self, memo: object) -> Entry:
        return self

    def dispatch(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        *,
        backend: Any = None,
        parallel_config: object = None,
    ) -> Tensor:
        """Stands for `diffusers...dispatch_attention_fn`: [b, s, h, d]."""
        # A processor whose keys are whole passes no parallel_config, so that a plan need not say so.
        local = self.kind is None and parallel_config is None
        sizes = None if local else self._sizes(query.shape[1], key.shape[1])
        if sizes is None:
            self._touch()
            assert self.original is not None, "a diffusers processor was intercepted, so diffusers is there"
            out: Tensor = self.original(
                *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, attention_kwargs),
                backend=backend,
            )
            return out
        if attention_kwargs:
            raise InterceptionError(
                f"attention_kwargs {sorted(attention_kwargs)} are meant for one backend and would be lost in "
                "context-parallel attention: leave them out"
            )
        return self._attend(
            *(query, key, value, attn_mask, sizes),
            dropout_p=dropout_p,
            causal=is_causal,
            scale=scale,
            backend=backend,
        )

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Stands for `F.scaled_dot_product_attention`: [b, h, s, d]."""
        sizes = self._sizes(query.shape[-2], key.shape[-2])
        if sizes is None:
            self._touch()
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if query.ndim != 4:
            raise InterceptionError(
                f"scaled_dot_product_attention was called with a {query.ndim}-D query; context-parallel attention "
                "needs [batch, heads, tokens, head_dim]"
            )
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        out = self._attend(q, k, v, attn_mask, sizes, dropout_p=dropout_p, causal=is_causal, scale=scale, backend=None)
        return out.transpose(1, 2)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sizes: Sizes,
        *,
        dropout_p: float,
        causal: bool,
        scale: float | None,
        backend: Any,
    ) -> Tensor:
        session = self.session
        self._touch()
        if dropout_p:
            raise InterceptionError(f"dropout_p={dropout_p} in attention is not computed context-parallel: set it to 0")
        if mask is not None and not isinstance(mask, Tensor):
            raise InterceptionError(
                f"a {type(mask).__name__} as attention mask cannot be split: set the backend to one that takes tensors"
            )
        out = attend_across(
            *(query, key, value, mask if mask is None else self._as_given(mask)),
            causal=causal,
            scale=scale,
            grouped=True,
            lengths=sizes,
            groups=session.groups.name,
            config=session.config,
            kernel=kernel_for(session, backend),
        )
        assert isinstance(out, Tensor), "no lse was asked for"
        return out

    def _sizes(self, queries: int, keys: int) -> Sizes | None:
        """Every rank's queries and keys, from this rank's; None where attention is over whole keys.

        Raises: PlanError: the plan's streams are not what came.
        """
        if self.kind is None:
            return find_sizes(self.session, queries, keys)
        if self.kind.ragged:
            return [], []
        call = self.session.current()
        rank = call.groups.context_rank
        lengths = call.sizes(self.kind.queries), call.sizes(self._keys)
        if (queries, keys) != (lengths[0][rank], lengths[1][rank]):
            raise PlanError(
                f"attention of {' + '.join(self.kind.queries)} to {' + '.join(self._keys)} got {queries} queries and "
                f"{keys} keys, but this rank holds {lengths[0][rank]} and {lengths[1][rank]} of these tokens: the plan "
                "does not fit this model"
            )
        return lengths

    @property
    def _keys(self) -> Streams:
        assert self.kind is not None, "asked of a plan that says its streams"
        return self.kind.queries if self.kind.keys is None else self.kind.keys

    def _as_given(self, mask: Tensor) -> Tensor:
        """A mask that was made for local queries and keys, as one that goes with keys, or with rows of all keys."""
        if self.kind is None or self.kind.mask == "given":
            return mask
        if self.kind.mask == "keys":
            return mask[..., :1, :]
        own, call = mask.diagonal(dim1=-2, dim2=-1), self.session.current()
        values = own if own.is_floating_point() else own.to(torch.uint8)
        everyone = gather(values, values.ndim - 1, call.sizes(self._keys), call.groups.name).to(own.dtype)
        rows: Tensor = own.unsqueeze(-1) * everyone.unsqueeze(-2)
        return rows

    def _touch(self) -> None:
        self.session.current().intercepted = True


def kernel_for(session: Session, backend: Any) -> str:
    """The session's kernel, else the one of diffusers' backend: the processor's, or the one set for all."""
    if session.kernel != "auto":
        return session.kernel
    if backend is None and session.backends is not None:
        backend = session.backends._active_backend
    return "auto" if backend is None else kernel_of_backend(getattr(backend, "value", backend))


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
