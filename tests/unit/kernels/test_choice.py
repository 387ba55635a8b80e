"""Choice of the kernel by name, device, dtype, head size and mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName

from lightning_cp.errors import KernelError
from lightning_cp.kernels import KERNEL_NAMES, check_kernel, choose_kernel, kernel_of_backend
from lightning_cp.kernels.choice import DIFFUSERS_BACKENDS, KERNELS

MASK = torch.ones(1, 1, 1, 4, dtype=torch.bool)


def _query(device: str, dtype: torch.dtype, d: int = 64) -> Any:
    return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 4, 2, d))


def test_names_are_unique_and_lead_to_kernels() -> None:
    assert len(set(KERNEL_NAMES)) == len(KERNEL_NAMES)
    assert KERNEL_NAMES[0] == "auto"
    assert {kernel.name for kernel in KERNELS} == set(KERNEL_NAMES[1:])
    pairs = [(kernel.name, kernel.device_type) for kernel in KERNELS]
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, MASK])
def test_flash_is_chosen_on_a_cpu(dtype: torch.dtype, mask: torch.Tensor | None) -> None:
    kernel = choose_kernel("auto", torch.ones(1, 4, 2, 8, dtype=dtype), mask)
    assert (kernel.name, kernel.device_type) == ("flash", "cpu")
    assert choose_kernel("math", torch.ones(1, 4, 2, 8, dtype=dtype), mask).name == "math"


@pytest.mark.parametrize(
    ("capability", "dtype", "d", "mask", "expected"),
    [
        ((9, 0), torch.bfloat16, 64, None, "cudnn"),
        ((8, 0), torch.float16, 128, None, "cudnn"),
        ((7, 5), torch.float16, 64, None, "flash"),
        ((9, 0), torch.bfloat16, 256, None, "flash"),
        ((9, 0), torch.bfloat16, 64, MASK, "efficient"),
        ((9, 0), torch.bfloat16, 512, None, "efficient"),
        ((9, 0), torch.float32, 64, None, "efficient"),
        ((9, 0), torch.float32, 64, MASK, "efficient"),
        ((9, 0), torch.float64, 64, None, "math"),
        ((9, 0), torch.float64, 64, MASK, "math"),
    ],
)
def test_the_first_that_can_is_chosen_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    d: int,
    mask: torch.Tensor | None,
    expected: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    kernel = choose_kernel("auto", _query("cuda", dtype, d), mask)
    assert kernel.name == expected
    assert kernel.device_type in ("cuda", "any")


@pytest.mark.parametrize(
    ("name", "query", "mask", "reason"),
    [
        ("cudnn", _query("cpu", torch.bfloat16), None, "it runs on cuda, not cpu"),
        ("flash", _query("cuda", torch.float32), None, "neither float16 nor bfloat16"),
        ("flash", _query("cuda", torch.float16), MASK, "it does not support masks"),
        ("flash", _query("cuda", torch.float16, 257), None, "head size 257 is above 256"),
        ("cudnn", _query("cuda", torch.float16, 129), None, "head size 129 is above 128"),
        ("efficient", _query("cuda", torch.float64), None, "dtype torch.float64"),
        ("flash", _query("cpu", torch.int32), None, "dtype torch.int32"),
    ],
)
def test_a_kernel_that_cannot_is_refused_with_the_reason(
    name: str, query: Any, mask: torch.Tensor | None, reason: str
) -> None:
    with pytest.raises(KernelError, match=f"kernel='{name}' cannot be used here: .*{reason}.*kernel='auto'"):
        choose_kernel(name, query, mask)


@pytest.mark.parametrize("name", ["fastest", "", None, 3, "FLASH"])
def test_an_unknown_kernel_is_refused_with_the_list(name: object) -> None:
    with pytest.raises(ValueError, match="must be one of auto, flash, cudnn"):
        check_kernel(name)
    with pytest.raises(KernelError, match=f"kernel={name!r}"):
        choose_kernel(name, torch.ones(1, 1, 1, 1), None)  # type: ignore[arg-type]


def test_diffusers_backends_lead_to_kernels_of_ours() -> None:
    theirs = {backend.value for backend in AttentionBackendName}
    for backend, kernel in DIFFUSERS_BACKENDS.items():
        assert backend in theirs, f"diffusers has no backend {backend!r}"
        assert kernel_of_backend(backend) == kernel
        assert check_kernel(kernel) == kernel


def test_other_backends_of_diffusers_are_refused_with_the_list() -> None:
    for backend in {backend.value for backend in AttentionBackendName} - DIFFUSERS_BACKENDS.keys():
        with pytest.raises(KernelError, match=f"'{backend}'.*native, _native_flash"):
            kernel_of_backend(backend)
