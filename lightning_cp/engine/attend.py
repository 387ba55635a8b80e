"""From the attention function that a model calls to attention across ranks: which tokens a call has, and where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_cp.attention import attend_across
from lightning_cp.attention.call import settings_of
from lightning_cp.attention.key_cache import KeyCache
from lightning_cp.attention.sparse.handles import is_block_mask
from lightning_cp.engine.attention.diffusers_dispatch import kernel_for
from lightning_cp.engine.attention.masks import (
    attend_here,
    call_flex,
    gather_token_mask,
    handle_across,
    outer_mask,
    token_mask,
)
from lightning_cp.engine.attention.replay import check_recomputation
from lightning_cp.engine.attention.scope import without_scope
from lightning_cp.engine.attention.segments import after_kept_keys, attend_by_segments
from lightning_cp.engine.attention.stand_ins import DISPATCH, ORIGINALS, SDPA
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.lengths import Sizes, are_whole, find_sizes
from lightning_cp.errors import InterceptionError, PlanError, ShapeError
from lightning_cp.plans import LOCAL, Attention


@dataclass(eq=False)
class AttentionDispatcher:
    """Attention of a session: calls of a model's modules become attention across ranks.

    `dispatch`, `sdpa` and `flex` stand in for the functions that models call. Each asks `sizes` how many queries and
    keys every rank has, and `_attend_with_lse` calls `attend_across` with them.

    Attributes:
        session: of the parallel model.
        kinds: the attention that the plan describes for a module; None, for plans in diffusers' format: the kind of
            each call is derived from its token counts.
    """

    session: Session
    kinds: tuple[Attention, ...] | None

    def __deepcopy__(self, memo: object) -> AttentionDispatcher:
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
        """Replace `diffusers...dispatch_attention_fn`; tensors are [b, s, h, d]."""
        # Plans in diffusers' format do not describe attention. A call without parallel_config has whole keys.
        local = self.kinds is None and parallel_config is None
        sizes = None if local else self.sizes(query.shape[1], key.shape[1], (key, value))
        if sizes is None:
            self._mark_intercepted()
            if is_block_mask(attn_mask):
                if dropout_p or is_causal or attention_kwargs:
                    raise InterceptionError("attention with a block mask takes no dropout, is_causal or other options")
                return attend_here(self.session, query, key, value, attn_mask, scale=scale, backend=backend)[0]
            arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, attention_kwargs
            out: Tensor = without_scope(ORIGINALS[DISPATCH], *arguments, backend=backend)
            return out
        if attention_kwargs:
            raise InterceptionError(
                f"attention_kwargs {sorted(attention_kwargs)} are options of one backend and are not supported by "
                "context-parallel attention: leave them out"
            )
        settings = {"dropout_p": dropout_p, "causal": is_causal, "scale": scale, "backend": backend}
        if self.kinds is not None and self.kinds[0].form == "block_causal":
            return self._by_segments(query, key, value, attn_mask, settings)
        return self._attend(query, key, value, attn_mask, sizes, **settings)

    def _by_segments(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: dict[str, Any]
    ) -> Tensor:
        """Compute block-causal attention with the kept arguments `segments` and `key_valid` of the forward.

        Without segments, all keys precede the queries or are of the same image: attention is not causal.
        """
        assert self.kinds is not None, "the plan describes this attention"
        if is_block_mask(mask):
            raise InterceptionError("block-causal attention of a plan takes no block mask: leave it out")
        call, kind = self.session.current(), self.kinds[0]
        segments, sizes = call.kept.get("segments"), call.sizes(kind.queries)
        if segments is None and kind.cached:
            keys, mask = after_kept_keys(call, sizes, key.shape[1], mask)
            return self._attend(query, key, value, mask, (sizes if keys else [], keys), **settings)
        if mask is not None or segments is None:
            raise InterceptionError("block-causal attention needs the argument `segments`, and takes no other mask")
        return attend_by_segments(
            query,
            key,
            value,
            segments=segments,
            key_valid=call.kept.get("key_valid"),
            sizes=sizes,
            rank=call.groups.context_rank,
            attend=lambda q, k, v, m, lengths: self._attend(q, k, v, m, lengths, **settings),
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
        """Replace `F.scaled_dot_product_attention`; tensors are [b, h, s, d]."""
        sizes = self.sizes(query.shape[-2], key.shape[-2], (key, value))
        if sizes is None:
            self._mark_intercepted()
            settings = {"scale": scale, "enable_gqa": enable_gqa}
            out: Tensor = without_scope(ORIGINALS[SDPA], query, key, value, attn_mask, dropout_p, is_causal, **settings)
            return out
        if query.ndim != 4:
            raise InterceptionError(
                f"scaled_dot_product_attention was called with a {query.ndim}-D query; context-parallel attention "
                "needs [batch, heads, tokens, head_dim]"
            )
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        out = self._attend(q, k, v, attn_mask, sizes, dropout_p=dropout_p, causal=is_causal, scale=scale, backend=None)
        return out.transpose(1, 2)

    def flex(self, original: object, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replace `flex_attention`; tensors are [b, h, s, d]."""
        if self.kinds is not None and self.kinds[0].form == "block_causal":
            raise InterceptionError("block-causal attention of a plan cannot be computed by flex_attention")
        return call_flex(self._attend_flex, query, key, value, *args, **kwargs)

    def _attend_flex(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any
    ) -> tuple[Tensor, Tensor | None]:
        sizes = self.sizes(query.shape[1], key.shape[1], (key, value))
        if sizes is None:
            self._mark_intercepted()
            return attend_here(self.session, query, key, value, mask, **settings)
        return self._attend_with_lse(query, key, value, mask, sizes, dropout_p=0.0, causal=False, **settings)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, sizes: Sizes, **settings: Any) -> Tensor:
        return self._attend_with_lse(query, key, value, mask, sizes, **settings)[0]

    def _attend_with_lse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        sizes: Sizes,
        *,
        dropout_p: float,
        causal: bool,
        scale: float | None,
        backend: Any = None,
        grouped: bool = True,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention across ranks. Args: mask: a tensor or a block mask."""
        session, call, handle = self.session, self.session.current(), None
        self._mark_intercepted()
        if dropout_p:
            raise InterceptionError(f"dropout_p={dropout_p}: context-parallel attention has no dropout; set it to 0")
        if is_block_mask(mask):
            fitting = None if self.kinds is None else self._fitting(sizes)
            cache = next((x for x in map(self.cache_of, fitting or ()) if x is not None), None)
            mask, handle = None, handle_across(mask, session, fitting, cache, sizes)
        elif mask is not None:
            self._check_mask(mask, query, sizes)
        settings = settings_of(
            query.shape[-1],
            causal=causal,
            scale=self._scale(scale, query),
            groups=call.groups.name,
            config=session.config,
            kernel=kernel_for(session, backend),
            grouped=grouped,
        )
        if call.evaluation is not None:
            if return_lse:
                raise InterceptionError("the LSE of attention is not computed with patches (PipeFusion): set patches=1")
            kind = next((x for x in self._fitting(sizes) if not x.ragged), None)
            return call.evaluation.attend(query, key, value, mask, kind, sizes=sizes, settings=settings), None
        mask = mask if mask is None else self._split_mask(mask, sizes[1])
        result = attend_across(
            query, key, value, mask, settings, lengths=sizes, block_mask=handle, return_lse=return_lse
        )
        return result if isinstance(result, tuple) else (result, None)

    def _check_mask(self, mask: Any, query: Tensor, sizes: Sizes) -> None:
        if not isinstance(mask, Tensor):
            raise InterceptionError(
                f"a {type(mask).__name__} cannot be an attention mask: give a bool or additive tensor, a BlockMask, or "
                "a lightning_cp.SparseMask"
            )
        if self._is_unsplit(mask, query, sizes):
            raise InterceptionError(
                f"a mask over all {mask.shape[-1]} keys of several modalities was not split: list it in the plan as "
                "`mask(...)`"
            )
        if not sizes[1] and self.kinds is not None and self.kinds[0].cached:
            raise InterceptionError("attention over keys of earlier forwards takes no mask: leave it out")

    def _scale(self, scale: float | None, query: Tensor) -> float | None:
        """Return the softmax scale; if it depends on the number of tokens, for the tokens of all ranks."""
        kind, call = None if self.kinds is None else self.kinds[0], self.session.current()
        base = None if kind is None or not kind.log_base else call.kept.get(kind.log_base)
        if kind is None or base is None:
            return scale
        tokens = sum(call.lengths[modality] for modality in kind.queries)
        local_scale: float = query.shape[-1] ** -0.5 if scale is None else scale
        return local_scale * math.sqrt(math.log(tokens, base))

    def _is_unsplit(self, mask: Tensor, query: Tensor, sizes: Sizes) -> bool:
        """Return True for a key mask over all keys of several modalities that was not split.

        Attention gathers the keys in rank order, so the mask's columns would belong to other keys.
        """
        if self.kinds is None or self.kinds[0].mask != "given" or query.shape[-3] == 1 or not sizes[1]:
            return False
        modalities = self.kinds[0].queries if self.kinds[0].keys is None else self.kinds[0].keys
        is_joint = len([s for s in modalities if self.session.current().lengths.get(s)]) > 1
        local_keys, call = sizes[1][self.session.current().groups.context_rank], self.session.current()
        whole = sum(call.lengths.get(modality, 0) for modality in modalities)
        return is_joint and mask.ndim == 4 and mask.shape[-2] == 1 and local_keys != mask.shape[-1] == whole

    def _split_mask(self, mask: Tensor, keys: list[int]) -> Tensor:
        """Convert a mask made for local queries and keys to a key mask, or to a query mask over all keys."""
        if self.kinds is None or self.kinds[0].mask == "given":
            return mask
        if self.kinds[0].mask == "keys":
            return mask[..., :1, :]
        if self.kinds[0].mask == "padded":
            return mask[..., : sum(keys)]
        local_mask = token_mask(mask)
        return outer_mask(local_mask, gather_token_mask(local_mask, keys, self.session.current().groups))

    def _mark_intercepted(self) -> None:
        self.session.current().intercepted = True
        check_recomputation(self.session.current())

    # --- which tokens a call has, on each rank

    def sizes(self, queries: int, keys: int, contents: Sequence[Tensor]) -> Sizes | None:
        """Derive the number of queries and keys on each rank from this rank's; None if the keys are whole.

        Empty lists: the numbers are unknown or ambiguous here; attention then exchanges the lengths between ranks.

        Args: queries, keys: number of tokens on this rank. contents: keys and values.
        Raises: PlanError: this rank's numbers fit no attention of the plan.
        """
        if self.kinds is None:
            return find_sizes(self.session, queries, keys)
        if self.kinds[0].ragged:
            return [], []
        call = self.session.current()
        rank, expected = call.groups.context_rank, []
        if self._has_local_among_others and are_whole(contents, keys, call.groups.context):
            return None
        for kind in self.kinds:
            sizes = self.sizes_of(kind, keys)
            if (queries, keys) == (sizes[0][rank], sizes[1][rank]):
                self._check_distinct(kind, sizes, keys)
                return None if kind.keys == LOCAL else sizes
            if kind.cached is True and queries == sizes[0][rank] and keys > sizes[1][rank]:
                return [], []  # every rank has kept keys of its own
            to = "each other" if kind.keys is None else " + ".join(kind.keys) or "whole keys"
            expected.append(f"{sizes[0][rank]} and {sizes[1][rank]} ({' + '.join(kind.queries)} to {to})")
        raise PlanError(
            f"attention got {queries} queries and {keys} keys, expected {', or '.join(expected)} on this rank: the "
            "plan does not fit this model"
        )

    @property
    def _has_local_among_others(self) -> bool:
        """True if calls with the same queries may have whole or sharded keys: token counts do not distinguish them."""
        kinds = self.kinds or ()
        split = {kind.queries for kind in kinds if kind.keys != LOCAL}
        return any(kind.queries in split for kind in kinds if kind.keys == LOCAL)

    def sizes_of(self, kind: Attention, keys: int) -> Sizes:
        call = self.session.current()
        if kind.keys == LOCAL:
            return call.sizes(kind.queries), [keys] * call.groups.context_size
        if (cache := self.cache_of(kind)) is not None:
            return call.sizes(kind.queries), cache.kv_lengths
        return call.sizes(kind.queries), call.sizes(kind.queries if kind.keys is None else kind.keys)

    def cache_of(self, kind: Attention) -> KeyCache | None:
        """Return the cache with the keys of this attention; None: it has no cache, or the block got none."""
        cache: KeyCache | None = self.session.current().kept.get(kind.cached) if isinstance(kind.cached, str) else None
        return cache

    def _fitting(self, sizes: Sizes) -> list[Attention]:
        """Return the kinds of attention over split keys that have these sizes."""
        return [kind for kind in self.kinds or () if kind.keys != LOCAL and self.sizes_of(kind, 0) == sizes]

    def _check_distinct(self, chosen: Attention, sizes: Sizes, keys: int) -> None:
        """Check that token counts distinguish this call from other kinds of attention on every rank.

        Raises: ShapeError: on some rank they are equal, because it has too few tokens.
        """
        call, pairs = self.session.current(), list(zip(*sizes))
        for kind in self.kinds or ():
            modalities = (*kind.queries, *(kind.keys or ()))
            if kind == chosen or kind.keys == LOCAL or not all(call.lengths.get(modality) for modality in modalities):
                continue
            other = list(zip(*self.sizes_of(kind, keys)))
            if pairs != other and any(a == b for a, b in zip(pairs, other)):
                raise ShapeError(
                    f"attention of {' + '.join(chosen.queries)} and of {' + '.join(kind.queries)} have the same "
                    f"numbers of queries and keys on a rank ({pairs} and {other}, in rank order), "
                    "which distinguish them: use lower degrees, or more tokens"
                )
