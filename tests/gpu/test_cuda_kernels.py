"""CUDA kernels against plain softmax attention in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.attention.merge import merge
from lightning_cp.errors import KernelError
from lightning_cp.kernels import PartialAttention, PartialAttentionGrad, attend, attend_backward, choose_kernel
from lightning_cp.kernels.choice import KERNELS
from lightning_cp.kernels.protocol import Kernel
from lightning_cp.training.modes import without_cudnn_attention
from tests.reference import softmax_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA_KERNELS = [kernel for kernel in KERNELS if kernel.device_type in ("cuda", "any")]
# Root mean square error, relative to the largest value: a few roundings of each dtype.
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # float32: TF32 allowed
SHAPES = [  # b, sq, sk, hq, hk, d
    (2, 64, 64, 4, 4, 64),
    (1, 100, 37, 6, 2, 64),  # lengths that no tile divides, grouped heads
    (2, 33, 70, 4, 1, 40),
    (1, 128, 128, 2, 2, 128),  # cuDNN's largest head size
    (1, 17, 130, 3, 3, 5),  # an odd head size
    (1, 40, 40, 2, 2, 256),
]
MASKS = ("none", "keys", "rows", "added", "no key")


def _mask(kind: str, b: int, h: int, sq: int, sk: int) -> Tensor | None:
    chance = torch.rand(b, 1, sq, sk, device="cuda") > 0.4
    if kind == "none":
        return None
    if kind == "keys":
        return chance[:, :, :1]
    if kind == "added":
        return torch.randn(1, h, sq, sk, device="cuda").masked_fill(~chance[:1], -torch.inf)
    if kind == "no key":
        chance[:, :, ::3] = False
    return chance


def _relative(actual: Tensor, expected: Tensor) -> float:
    """Root mean square error over the largest value; infinite where the infinities differ or NaN appears."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    if not torch.equal(actual.isinf(), expected.isinf()) or actual.isnan().any():
        return float("inf")
    finite = expected.isfinite()
    if not finite.any():
        return 0.0
    error = (actual - expected)[finite].square().mean().sqrt()
    return (error / expected[finite].abs().max().clamp(min=1e-6)).item()


def _check(kernel: Kernel, shape: tuple[int, ...], dtype: torch.dtype, mask_kind: str, causal: bool, lse: bool) -> None:
    b, sq, sk, hq, hk, d = shape
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, s, h, d, device="cuda").to(dtype) for s, h in ((sq, hq), (sk, hk), (sk, hk)))
    mask, scale = _mask(mask_kind, b, hq, sq, sk), d**-0.5
    part = attend(kernel, q, k, v, mask=mask, causal=causal, scale=scale)
    # As operators save it, and as slices of heads come: token-major, with gaps between tokens.
    part = PartialAttention(*(torch.cat([x, torch.full_like(x, 7.0)], 2)[:, :, : x.shape[2]] for x in part))
    assert part.out.shape == q.shape
    assert part.lse.shape == q.shape[:3]
    grad = PartialAttentionGrad(torch.randn_like(part.out), torch.randn_like(part.lse) if lse else None)
    grads = attend_backward(kernel, grad, q, k, v, part, mask=mask, causal=causal, scale=scale)
    inputs = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    out, expected_lse = softmax_attention(*inputs, None if mask is None else mask.cpu(), causal=causal, scale=scale)
    loss = (out * grad.out.double().cpu()).sum()
    if grad.lse is not None:
        loss = loss + (torch.where(expected_lse.isinf(), 0, expected_lse) * grad.lse.double().cpu()).sum()
    loss.backward()
    found = {"out": _relative(part.out, out), "lse": _relative(part.lse, expected_lse)}
    for name, mine, x in zip(("dq", "dk", "dv"), grads, inputs, strict=True):
        assert x.grad is not None
        found[name] = _relative(mine, x.grad)
    assert max(found.values()) < LIMITS[dtype], f"{kernel.name} {shape} {dtype} {mask_kind} {causal=} {lse=}: {found}"


@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", LIMITS)
def test_forward_and_backward_are_right(kernel: Kernel, dtype: torch.dtype) -> None:
    """Every shape and mask that the kernel accepts; skipped where it accepts none."""
    tried = 0
    for shape, mask_kind, lse in product(SHAPES, MASKS, (False, True)):
        b, sq, sk, hq, _, d = shape
        query = torch.empty(b, sq, hq, d, device="cuda", dtype=dtype)
        if kernel.refusal(query, _mask(mask_kind, b, hq, sq, sk)) is None:
            _check(kernel, shape, dtype, mask_kind, False, lse)
            tried += 1
    if not tried:
        pytest.skip(f"{kernel.name}: {kernel.refusal(torch.empty(1, 8, 2, 64, device='cuda', dtype=dtype), None)}")


@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)
def test_causal_is_right(kernel: Kernel) -> None:
    for shape, lse in product([(2, 64, 64, 4, 2, 64), (1, 77, 77, 2, 2, 40)], (False, True)):
        b, sq, _, hq, _, d = shape
        reason = kernel.refusal(torch.empty(b, sq, hq, d, device="cuda", dtype=torch.float16), None)
        if reason is not None:
            pytest.skip(f"{kernel.name}: {reason}")
        _check(kernel, shape, torch.float16, "none", True, lse)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("mask_kind", MASKS)
def test_auto_finds_a_kernel_for_everything(dtype: torch.dtype, mask_kind: str) -> None:
    for shape in SHAPES:
        b, sq, sk, hq, _, d = shape
        query = torch.empty(b, sq, hq, d, device="cuda", dtype=dtype)
        _check(choose_kernel("auto", query, _mask(mask_kind, b, hq, sq, sk)), shape, dtype, mask_kind, False, True)


def test_strides_and_empty_inputs_do_not_matter() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.randn(2, 4, 16, 64, device="cuda", dtype=dtype).transpose(1, 2)
        kernel = choose_kernel("auto", q, None)
        part = attend(kernel, q, q, q, mask=None, causal=False, scale=0.1)
        other = attend(kernel, q.contiguous(), q.contiguous(), q.contiguous(), mask=None, causal=False, scale=0.1)
        assert _relative(part.out, other.out) < 1e-3
        nothing = attend(kernel, q, q[:, :0], q[:, :0], mask=None, causal=False, scale=0.1)
        assert not nothing.out.any()
        assert bool((nothing.lse == -torch.inf).all())


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of [b, s, h, d]
    "slice of a wider tensor": lambda x: torch.cat([x, torch.full_like(x, 7.0).repeat(1, 1, 4, 1)], 2)[:, :, :4],
    "tokens first": lambda x: x.contiguous(),
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)
def test_backward_does_not_depend_on_layouts_of_earlier_calls(kernel: Kernel) -> None:
    """As in FLUX: attention's gradient is a slice of a wider tensor in some blocks, and contiguous in others."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    if (reason := kernel.refusal(tensors[0], None)) is not None:
        pytest.skip(f"{kernel.name}: {reason}")
    *qkv, grad_out = tensors
    inputs = [x.double().cpu().requires_grad_() for x in qkv]
    out, _ = softmax_attention(*inputs, None, causal=False, scale=0.125)
    out.backward(grad_out.double().cpu())
    part = attend(kernel, *qkv, mask=None, causal=False, scale=0.125)
    for of_out, of_grad in product(LAYOUTS, LAYOUTS):
        laid_out = PartialAttention(LAYOUTS[of_out](part.out), part.lse)
        grad = PartialAttentionGrad(LAYOUTS[of_grad](grad_out), None)
        grads = attend_backward(kernel, grad, *qkv, laid_out, mask=None, causal=False, scale=0.125)
        for mine, x in zip(grads, inputs, strict=True):
            assert x.grad is not None
            assert _relative(mine, x.grad) < LIMITS[torch.bfloat16], f"{of_out}, {of_grad}"


@pytest.mark.parametrize("size", [64, 128])
def test_plain_attention_in_training_does_not_depend_on_layouts_of_earlier_calls(size: int) -> None:
    """A model that is not parallel calls PyTorch's attention."""
    torch.manual_seed(0)
    *qkv, grad_out = (torch.randn(2, 300, 4, size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.double().cpu().requires_grad_() for x in qkv]
    out, _ = softmax_attention(*inputs, None, causal=False, scale=size**-0.5)
    out.backward(grad_out.double().cpu())
    with without_cudnn_attention():
        for name, layout in LAYOUTS.items():
            mine = [x.clone().requires_grad_() for x in qkv]
            plain = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in mine)).transpose(1, 2)
            plain.backward(layout(grad_out))
            for x, exact in zip(mine, inputs, strict=True):
                assert x.grad is not None
                assert exact.grad is not None
                assert _relative(x.grad, exact.grad) < LIMITS[torch.bfloat16], name


def test_a_kernel_for_the_cpu_is_refused() -> None:
    with pytest.raises(KernelError, match="cannot be used here"):
        choose_kernel("flash", torch.empty(1, 4, 2, 8, device="cuda", dtype=torch.float64), None)


def test_parts_are_merged_in_place_by_one_kernel() -> None:
    pytest.importorskip("triton")
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (
        PartialAttention(
            *(torch.randn(shape, generator=generator, device="cuda") for shape in ((2, 77, 3, 40), (2, 77, 3)))
        )
        for _ in range(2)
    )
    a.lse[:, 0] = float("-inf")
    weight = torch.sigmoid(b.lse.double() - a.lse.double()).unsqueeze(-1)
    out = a.out.double() + weight * (b.out.double() - a.out.double())
    lse = torch.logaddexp(a.lse.double(), b.lse.double())
    merged = merge(a, b)
    assert merged.out.data_ptr() == a.out.data_ptr()
    torch.testing.assert_close(merged.out.double(), out, rtol=0, atol=1e-5)
    torch.testing.assert_close(merged.lse.double(), lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask_kind", MASKS)
def test_tangents_are_exact(mask_kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, s, h, 64, device="cuda").to(dtype) for s, h in ((33, 4), (70, 2), (70, 2))]
    changes, mask = [torch.randn_like(x) for x in inputs], _mask(mask_kind, 2, 4, 33, 70)

    def attend_on_gpu(*x: Tensor) -> object:
        config = ContextParallelConfig()
        return context_parallel_attention(*x, mask, enable_gqa=True, parallel_config=config, return_lse=True)

    def attend_plainly(*x: Tensor) -> object:
        return softmax_attention(*x, None if mask is None else mask.cpu())

    _, found = torch.func.jvp(attend_on_gpu, tuple(inputs), tuple(changes))
    exact = [tuple(x.double().cpu() for x in tensors) for tensors in (inputs, changes)]
    _, expected = torch.func.jvp(attend_plainly, *exact)
    for mine, theirs in zip(found, expected, strict=True):
        assert _relative(mine, theirs) < LIMITS[dtype]
