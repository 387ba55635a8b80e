"""Context-parallel replacements for diffusers' attention dispatcher and PyTorch's attention function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention import attend_across
from lightning_cp.attention.call import settings_of
from lightning_cp.attention.sparse.handles import is_block_mask
from lightning_cp.comm.shards import gather_shards
from lightning_cp.engine.attention.block_masks import handle_across
from lightning_cp.engine.attention.diffusers_dispatch import kernel_for
from lightning_cp.engine.attention.flex_calls import attend_here, call_flex
from lightning_cp.engine.attention.planned_sizes import PlannedSizes
from lightning_cp.engine.attention.replay import check_recomputation
from lightning_cp.engine.attention.scope import without_scope
from lightning_cp.engine.attention.segments import after_kept_keys, attend_by_segments
from lightning_cp.engine.attention.stand_ins import DISPATCH, ORIGINALS, SDPA
from lightning_cp.engine.sharding.lengths import Sizes
from lightning_cp.errors import InterceptionError
from lightning_cp.mesh.groups import MeshGroups


@dataclass(eq=False)
class AttentionDispatcher(PlannedSizes):
    """Context-parallel attention of a session, for all modules with the same `kinds`."""

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
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        settings: dict[str, Any],
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
            mask, handle = None, handle_across(mask, self, sizes)
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
            kind = self.split_kind(sizes)
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


def token_mask(mask: Tensor) -> Tensor:
    """Return the mask of the tokens [..., s] from its outer product [..., s, s]: the diagonal holds the squares."""
    squares = mask.diagonal(dim1=-2, dim2=-1)
    return squares.sqrt() if squares.is_floating_point() else squares


def gather_token_mask(mask: Tensor, lengths: Sequence[int], groups: MeshGroups) -> Tensor:
    """All-gather the mask of the tokens [..., s_local], in rank order.

    Args: lengths: number of tokens on each rank. Ranks: all of the context group.
    """
    values = mask if mask.is_floating_point() else mask.to(torch.uint8)
    return gather_shards(values.contiguous(), values.ndim - 1, list(lengths), groups.name).to(mask.dtype)


def outer_mask(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the outer product [..., q, k] of the masks of queries and keys."""
    return queries.unsqueeze(-1) * keys.unsqueeze(-2)
