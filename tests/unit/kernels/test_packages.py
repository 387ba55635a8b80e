"""Kernels of other packages, with the packages replaced by modules that have their signatures and compute on CPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig
from lightning_cp.attention.api import attend_across
from lightning_cp.attention.call import settings_of
from lightning_cp.errors import KernelError
from lightning_cp.kernels import PartialAttention, PartialAttentionGrad, attend, attend_backward, choice
from lightning_cp.kernels.flash_attn import FlashAttn3Kernel, FlashAttn4Kernel, FlashAttnKernel
from lightning_cp.kernels.math import MathKernel
from lightning_cp.kernels.protocol import Kernel
from lightning_cp.kernels.sage import SageKernel
from lightning_cp.mesh.groups import SINGLE_RANK

MATH = MathKernel()


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """out [b, s, h, d] and lse [b, h, s], as all these packages return them; GQA is native."""
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    part = attend(MATH, q, k, v, mask=None, causal=causal, scale=scale)
    return part.out, part.lse.transpose(1, 2).contiguous()


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, ...]:
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert all(x.stride(-1) == 1 for x in (g, q, k, v, out))
    assert lse.is_contiguous()
    part = PartialAttention(out, lse.transpose(1, 2))
    return tuple(
        attend_backward(MATH, PartialAttentionGrad(g, None), q, k, v, part, mask=None, causal=causal, scale=scale)
    )


def _flash_attn_2() -> dict[str, Any]:
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Any, ...]:
        return *_forward(q, k, v, softmax_scale, causal), None, None

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        for into, grad in zip((dq, dk, dv), _backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)):
            into.copy_(grad)
        return softmax_lse

    return {"_flash_attn_forward": forward, "_flash_attn_backward": backward}


def _flash_attn_3() -> dict[str, Any]:
    def forward(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> tuple[Any, ...]:
        return *_forward(q, k, v, softmax_scale, causal), None, None

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        *,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        softmax_scale: float,
        is_causal: bool,
    ) -> None:
        for into, grad in zip((dq, dk, dv), _backward(dout, q, k, v, out, softmax_lse, softmax_scale, is_causal)):
            into.copy_(grad)

    return {"_flash_attn_forward": forward, "_flash_attn_backward": backward}


def _flash_attn_4() -> dict[str, Any]:
    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, return_lse: bool
    ) -> tuple[Any, ...]:
        assert return_lse
        return *_forward(q, k, v, softmax_scale, causal), None, None

    def backward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, ...]:
        assert softmax_scale is not None
        return _backward(dout, q, k, v, out, lse, softmax_scale, causal)

    return {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward}


def _sage() -> dict[str, Any]:
    def sageattn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: float | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert (tensor_layout, return_lse) == ("NHD", True)
        assert sm_scale is not None
        return _forward(q, k, v, sm_scale, is_causal)

    return {"sageattn": sageattn}


PACKAGES = {
    "flash_attn": (FlashAttnKernel(), "flash_attn.flash_attn_interface", _flash_attn_2),
    "flash_attn_3": (FlashAttn3Kernel(), "flash_attn_interface", _flash_attn_3),
    "flash_attn_4": (FlashAttn4Kernel(), "flash_attn.cute.interface", _flash_attn_4),
    "sage": (SageKernel(), "sageattention", _sage),
}


@pytest.fixture
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel of a package that Python finds installed."""
    kernel, interface, contents = PACKAGES[request.param]
    names = interface.split(".")
    for i in range(len(names)):
        module = ModuleType(".".join(names[: i + 1]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__dict__.update(contents())
    return kernel


@pytest.mark.parametrize("_kernel", ["flash_attn", "flash_attn_3", "flash_attn_4", "sage"], indirect=True)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [8, 5])
def test_a_package_is_called_as_it_expects(_kernel: Kernel, causal: bool, d: int) -> None:
    torch.manual_seed(0)
    shapes = [(2, 6, heads, d) for heads in (4, 2, 2, 4)]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64).transpose(0, 1) for shape in shapes)
    q, k, v, grad = (x.reshape(6, 2, x.shape[2], d).transpose(0, 1) for x in (q, k, v, grad))
    expected = attend(MATH, q, k, v, mask=None, causal=causal, scale=0.3)
    part = attend(_kernel, q, k, v, mask=None, causal=causal, scale=0.3)
    torch.testing.assert_close(part.out, expected.out)
    torch.testing.assert_close(part.lse, expected.lse)
    if isinstance(_kernel, SageKernel):
        return
    of_expected = attend_backward(
        MATH, PartialAttentionGrad(grad, None), q, k, v, expected, mask=None, causal=causal, scale=0.3
    )
    grads = attend_backward(
        _kernel, PartialAttentionGrad(grad, None), q, k, v, part, mask=None, causal=causal, scale=0.3
    )
    for mine, exact in zip(grads, of_expected, strict=True):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("_kernel", ["sage"], indirect=True)
def test_a_kernel_without_a_gradient_is_refused_in_the_forward(
    _kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SageKernel, "device_type", "cpu")
    monkeypatch.setattr(SageKernel, "refusal", lambda *_: None)
    assert "sage" in choice.KERNEL_NAMES
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with pytest.raises(KernelError, match="kernel='sage' has no gradient, and an input requires one"):
        _attend_with("sage", q)
    with torch.no_grad():
        torch.testing.assert_close(_attend_with("sage", q), _attend_with("math", q))


def _attend_with(kernel: str, q: Tensor) -> Tensor:
    """Self-attention on one rank."""
    config, name = ContextParallelConfig(), SINGLE_RANK.name
    settings = settings_of(q.shape[-1], causal=False, scale=None, groups=name, config=config, kernel=kernel)
    out = attend_across(q, q, q, None, settings, lengths=([], []))
    assert isinstance(out, Tensor)
    return out
