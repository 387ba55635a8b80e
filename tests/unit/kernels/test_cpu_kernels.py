"""Each kernel that runs on a CPU, through `attend`, against plain softmax attention in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_cp.kernels import PartialAttention, PartialAttentionGrad, accumulation_dtype_of, attend, attend_backward
from lightning_cp.kernels.choice import KERNELS
from lightning_cp.kernels.protocol import Inputs, Kernel
from tests.reference import max_error, softmax_attention

CPU_KERNELS = [kernel for kernel in KERNELS if kernel.device_type in ("cpu", "any")]
LIMITS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}
MASKS = ("none", "bool keys", "bool rows", "added", "least", "float32 added", "heads", "no key", "all padded")
each_kernel = pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)


def _mask(kind: str, b: int, h: int, sq: int, sk: int, dtype: torch.dtype) -> Tensor | None:
    chance = torch.rand(b, 1, sq, sk) > 0.4
    if kind == "none":
        return None
    if kind == "bool keys":
        return chance[:, :, :1]
    if kind == "bool rows":
        return chance
    if kind == "no key":
        chance[:, :, ::2] = False
        return chance
    if kind == "all padded":
        return torch.zeros(b, 1, 1, sk, dtype=torch.bool)
    if kind == "least":
        return torch.randn(b, 1, 1, sk).to(dtype).masked_fill(~chance[:, :, :1], torch.finfo(dtype).min)
    if kind == "float32 added":
        return torch.randn(1, h, sq, sk).masked_fill(~chance[:1], -torch.inf)
    if kind == "heads":
        return torch.rand(1, h, sq, sk) > 0.4
    return torch.randn(b, h, 1, sk).to(dtype)


def _errors(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, use_lse: bool, scale: float
) -> dict[str, float]:
    part = attend(kernel, q, k, v, mask=mask, causal=causal, scale=scale)
    assert part.out.dtype == q.dtype
    assert part.lse.dtype == accumulation_dtype_of(q.dtype)
    grad_out, grad_lse = torch.randn_like(part.out), torch.randn_like(part.lse)
    grads = attend_backward(
        kernel,
        PartialAttentionGrad(grad_out, grad_lse if use_lse else None),
        q,
        k,
        v,
        part,
        mask=mask,
        causal=causal,
        scale=scale,
    )
    inputs = [x.double().detach().requires_grad_() for x in (q, k, v)]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    out, lse = softmax_attention(*inputs, mask, causal=causal, scale=scale)
    finite = torch.where(lse.isinf(), 0, lse)
    loss = (out * grad_out.double()).sum() + use_lse * (finite * grad_lse.double()).sum()
    (loss + 0 * sum(x.sum() for x in inputs)).backward()
    assert [x.shape for x in grads] == [x.shape for x in inputs]
    named = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    found = {"out": max_error(part.out, out), "lse": max_error(part.lse, lse)}
    return found | {name: max_error(x, y.grad) for (name, x), y in zip(named.items(), inputs)}  # type: ignore[arg-type]


@each_kernel
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.default(1)
def test_forward_and_backward_are_exact(kernel: Kernel, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(2, 5, 7, 4, 2, 8), (1, 6, 6, 3, 3, 5), (2, 1, 9, 4, 1, 1), (1, 33, 70, 6, 2, 16), (2, 0, 3, 2, 2, 4)]
    shapes += [(2, 3, 0, 2, 1, 4), (0, 3, 3, 2, 2, 4)]
    for (b, sq, sk, hq, hk, d), mask_kind, use_lse in product(shapes, MASKS, (False, True)):
        q, k, v = (torch.randn(b, s, h, d).to(dtype) for s, h in ((sq, hq), (sk, hk), (sk, hk)))
        mask = _mask(mask_kind, b, hq, sq, sk, dtype)
        found = _errors(kernel, q, k, v, mask, False, use_lse, 0.5 if use_lse else d**-0.5)
        worst = max(found.values())
        assert worst < LIMITS[dtype] * (3 if use_lse else 1), f"{(b, sq, sk, hq, hk, d)} {mask_kind} {use_lse}: {found}"


@each_kernel
def test_causal_is_exact(kernel: Kernel) -> None:
    torch.manual_seed(0)
    for s, hk, d, use_lse in product((1, 2, 9, 65), (4, 2), (3, 8), (False, True)):
        q, k, v = (torch.randn(2, s, h, d, dtype=torch.float64) for h in (4, hk, hk))
        found = _errors(kernel, q, k, v, None, True, use_lse, d**-0.5)
        assert max(found.values()) < 1e-13, f"{s} {hk} {d} {use_lse}: {found}"


@each_kernel
def test_strides_do_not_matter(kernel: Kernel) -> None:
    torch.manual_seed(0)
    base = [torch.randn(2, s, h, 6, dtype=torch.float64) for s, h in ((5, 4), (7, 2), (7, 2))]
    layouts = {
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "last stride 2": lambda x: x.repeat_interleave(2, 3)[..., ::2],
        "last dim outermost": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        "expanded": lambda x: x[:1, :1, :1].expand_as(x),
        "expanded last": lambda x: x[..., :1].expand_as(x),
    }
    for name, layout in layouts.items():
        q, k, v = (layout(x) for x in base)  # type: ignore[no-untyped-call]
        mask = layout(torch.randn(2, 4, 5, 7, dtype=torch.float64))  # type: ignore[no-untyped-call]
        assert max(_errors(kernel, q, k, v, mask, False, True, 0.4).values()) < 1e-13, name


@each_kernel
def test_a_row_without_any_key_is_zero_and_gets_no_gradient(kernel: Kernel) -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    mask[:, :, 1] = True
    part = attend(kernel, q, k, v, mask=mask, causal=False, scale=1.0)
    empty = [0, 2, 3]
    assert not part.out[:, empty].any()
    assert bool((part.lse[:, empty] == -torch.inf).all())
    assert bool(part.lse[:, 1].isfinite().all())
    grad = PartialAttentionGrad(torch.ones_like(part.out), torch.ones_like(part.lse))
    grads = attend_backward(kernel, grad, q, k, v, part, mask=mask, causal=False, scale=1.0)
    assert not grads.query[:, empty].any()
    assert all(bool(x.isfinite().all()) for x in grads)


@each_kernel
def test_the_gradients_of_two_chunks_with_the_merged_part_add_up(kernel: Kernel) -> None:
    """Steps of a ring: the final out and lse, with one chunk of keys at a time, one of them all padding."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, s, 2, 8, dtype=torch.float64) for s in (5, 9, 9))
    mask = torch.rand(2, 1, 1, 9) > 0.3
    mask[..., 4:7] = False
    mask[..., 0] = True
    whole = attend(kernel, q, k, v, mask=mask, causal=False, scale=0.3)
    grad = PartialAttentionGrad(torch.randn_like(whole.out), torch.randn_like(whole.lse))
    expected = attend_backward(kernel, grad, q, k, v, whole, mask=mask, causal=False, scale=0.3)
    dq, dks, dvs = torch.zeros_like(q), [], []
    for chunk in (slice(0, 4), slice(4, 7), slice(7, 9)):
        grads = attend_backward(
            kernel, grad, q, k[:, chunk], v[:, chunk], whole, mask=mask[..., chunk], causal=False, scale=0.3
        )
        dq += grads.query
        dks.append(grads.key)
        dvs.append(grads.value)
    for mine, theirs in zip((dq, torch.cat(dks, 1), torch.cat(dvs, 1)), expected, strict=True):
        assert max_error(mine, theirs) < 1e-13


class _AtItsLimit:
    """A kernel with a largest head size of 8, so that the column for the gradient of lse does not fit."""

    name = "limited"
    device_type = "cpu"
    native_gqa = True

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        return None if query.shape[-1] <= 8 else "head size above 8"

    def forward(self, inputs: Inputs, mask: Tensor | None, *, causal: bool, scale: float) -> PartialAttention:
        return CPU_KERNELS[0].forward(inputs, mask, causal=causal, scale=scale)

    def backward(self, *_: object, **__: object) -> None:
        raise AssertionError("asked for more than it takes")


def test_gradients_through_lse_are_computed_also_at_a_kernels_largest_head_size() -> None:
    q, k, v = (torch.randn(2, 5, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    found = _errors(_AtItsLimit(), q, k, v, None, False, True, 0.3)  # type: ignore[arg-type]
    assert max(found.values()) < 1e-13
