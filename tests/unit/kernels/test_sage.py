"""SageAttention's kernel, with the package replaced by a module that has its signature and computes on CPU."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig
from lightning_cp.attention.api import attend_across
from lightning_cp.attention.call import settings_of
from lightning_cp.errors import KernelError
from lightning_cp.kernels import attend, choice
from lightning_cp.kernels.math import MathKernel
from lightning_cp.kernels.torch_kernels import SageKernel
from lightning_cp.mesh.groups import SINGLE_RANK

MATH = MathKernel()


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [b, s, h, d] and lse [b, h, s]."""
    assert (tensor_layout, return_lse) == ("NHD", True)
    assert sm_scale is not None
    assert all(x.is_contiguous() for x in (q, k, v))
    part = attend(MATH, q, k, v, mask=None, causal=is_causal, scale=sm_scale)
    return part.out, part.lse.transpose(1, 2).contiguous()


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sageattention")
    module.__dict__["sageattn"] = sageattn
    monkeypatch.setitem(sys.modules, "sageattention", module)


@pytest.mark.parametrize("causal", [False, True])
def test_the_package_is_called_as_it_expects(causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 2, heads, 5, dtype=torch.float64).transpose(0, 1) for heads in (4, 2, 2))
    expected = attend(MATH, q, k, v, mask=None, causal=causal, scale=0.3)
    part = attend(SageKernel(), q, k, v, mask=None, causal=causal, scale=0.3)
    torch.testing.assert_close(part.out, expected.out)
    torch.testing.assert_close(part.lse, expected.lse)


def test_a_kernel_without_a_gradient_is_refused_in_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_release_without_a_log_sum_exp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release 1.0.6 takes any keyword, and would return a batch of two as if it were a result and its log-sum-exp."""

    def old(q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", **_: object) -> Tensor:
        return q

    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleType(name))
    q = torch.randn(2, 4, 2, 8, dtype=torch.bfloat16)
    assert SageKernel().refusal(q, None) is None
    monkeypatch.setitem(sys.modules["sageattention"].__dict__, "sageattn", old)
    assert "returns no log-sum-exp" in str(SageKernel().refusal(q, None))
