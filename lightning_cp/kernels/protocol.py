"""What a kernel is: attention of one set of queries over one set of keys, on one device.

Shapes here and in every kernel file: b batch, s tokens (sq queries, sk keys), h heads (hq, hk), d head size.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class PartialAttention(NamedTuple):
    """Attention over some of the keys, to be merged with attention over others.

    out: [b, sq, hq, d]. lse: [b, sq, hq], natural log of the sum of exponentials, float32 (float64 for float64
    inputs). A query that may attend to none of the keys has out 0 and lse -inf.
    """

    out: Tensor
    lse: Tensor


class PartialAttentionGrad(NamedTuple):
    """Gradient of a part: out [b, sq, hq, d]; lse [b, sq, hq], None where lse was not used."""

    out: Tensor
    lse: Tensor | None


class Grads(NamedTuple):
    """Gradients of the inputs, in their shapes."""

    query: Tensor
    key: Tensor
    value: Tensor


class Inputs(NamedTuple):
    """query [b, sq, hq, d], key and value [b, sk, hk, d]; or their tangents."""

    query: Tensor
    key: Tensor
    value: Tensor


class Kernel(Protocol):
    """One backend. `local.attend` and `local.attend_backward` call it and take care of what is not its business:

    there is at least one query and one key; q, k, v are [b, s, h, d] of one dtype with a last stride of 1; a mask is
    additive, float32 (float64 for float64), [b or 1, hq or 1, sq or 1, sk], contiguous; causal comes with sq = sk and
    without a mask; hk = hq unless `native_gqa`; in backward lse is finite. Rows without any key may hold anything.
    """

    name: str
    device_type: str
    native_gqa: bool

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        """Why it cannot compute this (dtype, head size, mask, missing package); None where it can."""
        ...

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float
    ) -> PartialAttention:
        """Attention, and its log-sum-exp."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PartialAttention,
        mask: Tensor | None,
        *,
        causal: bool,
        scale: float,
    ) -> Grads:
        """Gradients through `part.out`, where `part` is attention over these keys *and any others*.

        With P = exp(scale q k + mask - lse): dv = P g, dS = P (g v - sum(g out)), dq = scale dS k, dk = scale dS q.
        So a ring's last out and lse, given with one chunk of keys, yield that chunk's share.
        """
        ...


class TangentKernel(Kernel, Protocol):
    """A kernel that computes forward derivatives too."""

    def tangents(
        self, inputs: Inputs, tangents: Inputs, lse: Tensor, mask: Tensor | None, *, causal: bool, scale: float
    ) -> PartialAttention:
        """Sums over these keys that give the tangents of attention over these keys *and any others*.

        With P = exp(scale q k + mask - lse) and dS = scale (dq k + q dk): out = sum(P (dS v + dv)), lse = sum(P dS).
        The sums of all chunks of a ring, added, are d(lse) = lse and d(out) = out - lse * (attention's out).

        Args:
            tangents: dq, dk and dv, in the shapes of `inputs`.
            lse: [b, sq, hq] over all keys, finite.
        Returns: both sums, in float32 (float64 for float64).
        """
        ...
