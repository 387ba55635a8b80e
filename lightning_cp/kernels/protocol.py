"""Kernel protocol: attention of one set of queries over one set of keys, on one device.

Shapes in all kernel files: b batch, s tokens (sq queries, sk keys), h heads (hq query heads, hk KV heads), d head size.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class PartialAttention(NamedTuple):
    """Attention over some of the keys, to be merged with attention over other keys.

    Queries without a key to attend to have out 0 and lse -inf.

    Attributes:
        out: [b, sq, hq, d].
        lse: [b, sq, hq], natural log of the sum of exponentials, float32 (float64 for float64 inputs).
    """

    out: Tensor
    lse: Tensor


class PartialAttentionGrad(NamedTuple):
    """Gradients of a `PartialAttention`: out [b, sq, hq, d]; lse [b, sq, hq], or None if lse was not used."""

    out: Tensor
    lse: Tensor | None


class Grads(NamedTuple):
    """Gradients of query, key and value, in their shapes."""

    query: Tensor
    key: Tensor
    value: Tensor


class Inputs(NamedTuple):
    """Query [b, sq, hq, d], key and value [b, sk, hk, d], or their tangents."""

    query: Tensor
    key: Tensor
    value: Tensor


class Kernel(Protocol):
    """One attention backend, called by `local.attend` and `local.attend_backward`.

    The callers guarantee:

    - q, k, v: [b, s, h, d], of one dtype, last stride 1, at least one query and one key; hk = hq unless `native_gqa`.
    - mask: additive, [b or 1, hq or 1, sq or 1, sk], contiguous, float32 (float64 for float64 inputs).
    - causal: only with sq = sk and without a mask.
    - lse in backward: finite.

    `forward` may return any values for queries without a key: the caller overwrites them.
    """

    name: str
    device_type: str
    native_gqa: bool

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        """Return why the kernel cannot compute this (dtype, head size, mask, missing package); None if it can."""
        ...

    def forward(self, inputs: Inputs, mask: Tensor | None, *, causal: bool, scale: float) -> PartialAttention:
        """Compute attention and its LSE."""
        ...

    def backward(
        self, grad: Tensor, inputs: Inputs, part: PartialAttention, mask: Tensor | None, *, causal: bool, scale: float
    ) -> Grads:
        """Compute the gradients from that of `part.out`; `part` is attention over these keys *and any others*.

        With g = `grad` and P = exp(scale q k + mask - lse): dv = P g, dS = P (g v - sum(g out)), dq = scale dS k,
        dk = scale dS q.
        With out and lse over all keys of a ring, one chunk of keys gives the gradients through that chunk.
        """
        ...


class TangentKernel(Kernel, Protocol):
    """Kernel that also computes forward derivatives."""

    def tangents(
        self, inputs: Inputs, tangents: Inputs, lse: Tensor, mask: Tensor | None, *, causal: bool, scale: float
    ) -> PartialAttention:
        """Compute the sums over these keys for the tangents of attention over these keys *and any others*.

        With P = exp(scale q k + mask - lse) and dS = scale (dq k + q dk): A = sum(P (dS v + dv)) and B = sum(P dS).
        Added over all chunks of a ring, they give the tangents d(out) = A - B out and d(lse) = B.

        Args:
            tangents: dq, dk and dv, in the shapes of `inputs`.
            lse: [b, sq, hq], over all keys, finite.
        Returns: A as `out` and B as `lse`, in float32 (float64 for float64).
        """
        ...
