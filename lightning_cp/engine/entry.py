"""Where intercepted attention calls arrive: diffusers' dispatcher and PyTorch's function, context-parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.attention import attend_across
from lightning_cp.engine.session import Call, Session
from lightning_cp.errors import InterceptionError, PlanError
from lightning_cp.kernels import kernel_of_backend
from lightning_cp.plans import Streams


@dataclass(eq=False)
class Entry:
    """Attention over some streams of a session; `streams` None: found out from the lengths (diffusers-format plans)."""

    session: Session
    streams: Streams | None
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
        # The processor says that its keys are whole here, or they are as many as in an argument that is left whole.
        if self.streams is None and (parallel_config is None or is_whole(self.session.current(), key.shape[1])):
            self._touch()
            assert self.original is not None, "a diffusers processor was intercepted, so diffusers is there"
            local: Tensor = self.original(
                *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, attention_kwargs),
                backend=backend,
            )
            return local
        if attention_kwargs:
            raise InterceptionError(
                f"attention_kwargs {sorted(attention_kwargs)} are meant for one backend and would be lost in "
                "context-parallel attention: leave them out"
            )
        return self._attend(
            query, key, value, attn_mask, dropout_p=dropout_p, causal=is_causal, scale=scale, backend=backend
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
        if self.streams is None and self._keys_are_whole(key.shape[-2]):
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
        out = self._attend(q, k, v, attn_mask, dropout_p=dropout_p, causal=is_causal, scale=scale, backend=None)
        return out.transpose(1, 2)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        dropout_p: float,
        causal: bool,
        scale: float | None,
        backend: Any,
    ) -> Tensor:
        session = self.session
        call = session.current()
        self._touch()
        if dropout_p:
            raise InterceptionError(f"dropout_p={dropout_p} in attention is not computed context-parallel: set it to 0")
        if mask is not None and not isinstance(mask, Tensor):
            raise InterceptionError(
                f"a {type(mask).__name__} as attention mask cannot be split: set the backend to one that takes tensors"
            )
        if self.streams is not None:
            lengths = call.sizes(self.streams)
            own = lengths[call.groups.context_rank]
            if query.shape[1] != own or key.shape[1] != own:
                raise PlanError(
                    f"attention over {' + '.join(self.streams)} got {query.shape[1]} queries and {key.shape[1]} keys, "
                    f"but this rank holds {own} of these tokens: the plan does not fit this model"
                )
            pair = (lengths, lengths)
        else:
            pair = (_held(call, query.shape[1]), infer_sizes(call, key.shape[1]))
            if not (pair[0] and pair[1]):
                pair = ([], [])
        out = attend_across(
            *(query, key, value, mask),
            causal=causal,
            scale=scale,
            grouped=True,
            lengths=pair,
            groups=session.groups.name,
            config=session.config,
            kernel=kernel_for(session, backend),
        )
        assert isinstance(out, Tensor), "no lse was asked for"
        return out

    def _touch(self) -> None:
        if not torch.compiler.is_compiling():
            self.session.current().intercepted = True

    def _keys_are_whole(self, tokens: int) -> bool:
        """Whether keys of this length are a tensor that was never split. Raises: PlanError where none can tell."""
        call = self.session.current()
        local = {n for vector in candidates(call) for n in vector}
        if call.whole & local:
            raise PlanError(
                f"a replicated argument has {sorted(call.whole & local)} tokens, as many as a rank's shard, so this "
                "plan leaves open which attention is over shards: give a lightning_cp.plans.Plan that names it "
                '(attention={"cross_attn": LOCAL})'
            )
        return tokens in call.whole


def kernel_for(session: Session, backend: Any) -> str:
    """The session's kernel, else the one of diffusers' backend: the processor's, or the one set for all."""
    if session.kernel != "auto":
        return session.kernel
    if backend is None and session.backends is not None:
        backend = session.backends._active_backend
    return "auto" if backend is None else kernel_of_backend(getattr(backend, "value", backend))


def candidates(call: Call) -> list[list[int]]:
    """What each rank may hold of the split tensors: each alone, and two joined."""
    found = [call.sizes(streams) for n in (1, 2) for streams in combinations_with_replacement(call.lengths, n)]
    return [vector for i, vector in enumerate(found) if vector not in found[:i]]


def is_whole(call: Call, tokens: int) -> bool:
    """Whether a tensor of so many tokens was never split, and no rank could take it for its share of one that was."""
    return tokens in call.whole and not any(tokens in vector for vector in candidates(call))


def _held(call: Call, tokens: int) -> list[int]:
    """Every rank's queries; whole ones are on every rank, and each computes all of them."""
    return [tokens] * call.groups.context_size if is_whole(call, tokens) else infer_sizes(call, tokens)


def infer_sizes(call: Call, own: int) -> list[int]:
    """Every rank's tokens, from this rank's; empty where that leaves a choice on any rank (so on all alike).

    Raises: PlanError: `own` fits nothing that was split.
    """
    vectors, rank = candidates(call), call.groups.context_rank
    columns = list(zip(*vectors, strict=True))
    if any(len(set(column)) < len(column) for column in columns):
        return []
    for vector in vectors:
        if vector[rank] == own:
            return vector
    raise PlanError(
        f"{own} tokens on rank {rank} are the share of none of the split tensors {sorted(set(call.lengths.values()))}, "
        "nor of two of them joined: give a lightning_cp.plans.Plan"
    )
