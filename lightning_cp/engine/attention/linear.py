"""Linear attention over the tokens of all ranks: each rank computes a small matrix per head, which is all-reduced.

out = (sum_j v_j k_j^T) q / (sum_j k_j . q),  with k and q >= 0
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.comm.halo import sum_over_ranks
from lightning_cp.engine.session import Session
from lightning_cp.errors import InterceptionError
from lightning_cp.plans import Modalities

_SMALLEST = 1e-15  # added to the divisor, against division by zero


@dataclass(eq=False)
class LinearAttention:
    """Processor of ReLU linear attention (diffusers' `Attention`), with or without rotary embedding.

    Attributes: modalities: modalities of the tokens.

    Gradient: exact; backward sums over ranks, like forward. Ranks: all of the context group.
    Source: Katharopoulos et al., arXiv:2006.16236; Xie et al., arXiv:2410.10629.
    """

    session: Session
    modalities: Modalities

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearAttention:
        copied = LinearAttention(self.session, self.modalities)
        copied.__dict__.update({k: copy.deepcopy(x, memo) for k, x in self.__dict__.items() if k != "session"})
        return copied

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,  # [b, s_local, c]
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,  # cos, sin, each [1, s_local, 1, d]
    ) -> Tensor:
        if encoder_hidden_states is not None or attention_mask is not None:
            raise InterceptionError("context-parallel linear attention takes neither other keys nor a mask")
        self.session.current().intercepted = True
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in (F.relu(q), F.relu(k), v))
        out = self._attend(q, k, v, rotary_emb).flatten(2).to(hidden_states.dtype)
        for layer in attn.to_out:
            out = layer(out)
        return out.clip(-65504, 65504) if out.dtype == torch.float16 else out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rotary_emb: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attend over all ranks; q, k, v are [b, s_local, h, d]. The divisor uses q and k before rotary embedding."""
        wide = torch.promote_types(q.dtype, torch.float32)
        rotated = (q, k) if rotary_emb is None else (_rotate(q, *rotary_emb), _rotate(k, *rotary_emb))
        q, k, v, rotated_q, rotated_k = (x.to(wide) for x in (q, k, v, *rotated))
        total = self._sum(v, rotated_k, k)
        weighted = torch.einsum("bhde,bshe->bshd", total[:, :, :-1], rotated_q)
        return weighted / (torch.einsum("bhe,bshe->bsh", total[:, :, -1], q).unsqueeze(-1) + _SMALLEST)

    def _sum(self, v: Tensor, rotated_k: Tensor, k: Tensor) -> Tensor:
        """Sum over the tokens of all ranks and patches. Returns: [b, h, d + 1, d]."""
        call = self.session.current()
        if call.evaluation is None:
            return sum_over_ranks(_matrices(v, rotated_k, k), call.groups.name)
        return call.evaluation.sum_over_patches(self.modalities, (v, rotated_k, k), _matrices)


def _matrices(v: Tensor, rotated_k: Tensor, k: Tensor) -> Tensor:
    """Return the sums over tokens: that of v k^T, and that of k in a last row."""
    return torch.cat([torch.einsum("bshd,bshe->bhde", v, rotated_k), k.sum(1).unsqueeze(2)], 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to pairs of neighbouring channels; cos and sin hold each value twice."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).type_as(x)
