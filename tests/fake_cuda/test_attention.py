"""Forward and backward of every mode on fake CUDA tensors: devices, dtypes, shapes, strides, copies between devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig
from lightning_cp.attention import operator
from lightning_cp.attention.call import Lengths, Settings
from lightning_cp.attention.derivatives import attention_tangents
from lightning_cp.attention.prepared import encode_lengths
from lightning_cp.mesh.groups import groups_for
from tests.fake_cuda.world import RANK, WORLD, fake_cuda, fake_ranks
from tests.harness.cases import in_turn, pairwise

LENGTHS = {"even": (32, 32, 32, 32), "uneven": (33, 32, 32, 30), "a rank without tokens": (40, 41, 0, 7)}
MODES = {
    "ring allgather": (4, 1, "allgather"),
    "ring alltoall": (4, 1, "alltoall"),
    "grid": (4, 1, "grid"),
    "ulysses": (1, 4, "allgather"),
    "unified allgather": (2, 2, "allgather"),
    "unified alltoall": (2, 2, "alltoall"),
}
KERNELS = {
    "flash": (torch.bfloat16, torch.float16),
    "cudnn": (torch.bfloat16, torch.float16),
    "efficient": (torch.bfloat16, torch.float16, torch.float32),
    "math": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    with fake_ranks():
        yield


def mask_of(kind: str, lengths: tuple[int, ...]) -> Tensor | None:
    if not kind:
        return None
    own = lengths[RANK]
    shape = (2, 1, 1, own) if kind == "key_mask" else (2, 8, own, sum(lengths))
    return torch.empty(shape, device="cuda", dtype=torch.bool)


def check(
    mode: str,
    *,
    kernel: str = "flash",
    dtype: torch.dtype = torch.bfloat16,
    lengths: tuple[int, ...] = LENGTHS["uneven"],
    mask: str = "",
    causal: bool = False,
    kv_heads: int = 8,
    wide: bool = True,
    with_lse: bool = True,
) -> None:
    """Run both operators' bodies and the forward derivative, and compare with what their fakes promise to compilers."""
    ring, ulysses, rotate_method = MODES[mode]
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, rotate_method=rotate_method)
    groups = groups_for(config)
    settings = Settings(causal, 0.125, groups.name, kernel, rotate_method, wide, kv_heads != 8)
    numbers = (list(lengths), list(lengths))
    encoded_lengths = encode_lengths(Lengths(lengths, lengths, mask, (lengths[RANK],) * WORLD))
    with fake_cuda() as recorder:
        q = torch.empty(2, lengths[RANK], 8, 64, device="cuda", dtype=dtype)
        k, v = (torch.empty(2, lengths[RANK], kv_heads, 64, device="cuda", dtype=dtype) for _ in range(2))
        given = mask_of(mask, lengths)
        found = operator.run_attention(q, k, v, given, None, *numbers, with_lse, *settings)
        promised = torch.ops.lightning_cp.attention(q, k, v, given, None, *numbers, with_lse, *settings)
        compare(found, promised)
        out, lse, *kept, _ = found
        saved = list(kept[:3]) + list(kept[4:]) if kept[0].ndim == 4 else [q, k, v, out, lse]
        seen = (kept[3] if kept[3].ndim == 4 else None) if kept[0].ndim == 4 else given
        grad_lse = torch.empty_like(lse) if with_lse else None
        backward = (torch.empty_like(out), grad_lse, saved, seen, None, encoded_lengths, list(k.shape), *settings)
        grads = operator.run_attention_backward(*backward)
        compare(grads, torch.ops.lightning_cp.attention_backward(*backward))
        kept, shapes = [*saved, seen, None, encoded_lengths], [x.shape for x in (q, k, v)]
        auto = settings._replace(kernel="auto")
        changes = attention_tangents((q, k, v), kept, shapes=shapes, with_lse=with_lse, settings=auto)
        compare(changes, (out, lse))
    assert [tuple(x.shape) for x in grads] == [tuple(x.shape) for x in (q, k, v)]
    assert recorder.crossings == [], recorder.crossings


def compare(found: tuple[Tensor, ...], promised: tuple[Tensor, ...]) -> None:
    for i, (x, y) in enumerate(zip(found, promised, strict=True)):
        facts = [(t.device.type, t.dtype, tuple(t.shape), t.stride() if t.numel() else ()) for t in (x, y)]
        assert facts[0] == facts[1], f"result {i}"


_KERNELS = [(kernel, dtype) for kernel, dtypes in KERNELS.items() for dtype in dtypes]


_ARGUMENTS = pairwise(
    *(MODES, LENGTHS, (8, 4, 2), ("", "key_mask", "query_mask"), (False, True), (True, False)),
    valid=lambda _, lengths, __, mask, *___: not mask or lengths == "even",  # other ranks' masks are as this one's
)


@pytest.mark.parametrize("mode", ["", *MODES])
@pytest.mark.default(1)
def test_lengths_masks_and_grouped_queries(mode: str) -> None:
    """Args: mode: "" for the first few cases of all modes."""
    for case in _ARGUMENTS[3:] if mode else _ARGUMENTS[:3]:
        name, lengths, kv_heads, mask, causal, with_lse = case
        if mode in ("", name):
            given: Any = {"kv_heads": kv_heads, "mask": mask, "causal": causal, "with_lse": with_lse}
            check(name, kernel="efficient", lengths=LENGTHS[lengths], wide=not with_lse, **given)


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_and_dtype(kernel: str) -> None:
    for (name, dtype), mode, causal in in_turn(_KERNELS, MODES, (False, True, True)):
        if name == kernel:
            needs_masks = mode == "grid" and name in ("flash", "cudnn")
            check(mode, kernel=name, dtype=dtype, causal=causal and not needs_masks, lengths=LENGTHS["even"])
