"""The Triton merge kernel, compiled ahead of time for GPUs that this machine does not have."""

from __future__ import annotations

import re
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_cp.attention import merge_triton

MAX_REGISTERS = {"aligned": 64, "other": 128}  # by rows of `out`; 64 let 8 programs of 128 threads run on a processor
ARCHITECTURES = (80, 90, 100)
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def source(a_out: torch.Tensor, a_lse: torch.Tensor, b_out: torch.Tensor, b_lse: torch.Tensor) -> ASTSource:
    """The kernel with the signature that Triton derives at launch: 1 is a constant, multiples of 16 are marked."""
    _, tokens, _, head_dim = a_out.shape
    strides = [stride for x in (a_out, a_lse, b_out, b_lse) for stride in x.stride()]
    constants = list(merge_triton.block_shape(head_dim).values())
    values: list[Any] = [a_out, a_lse, b_out, b_lse, tokens, head_dim, *strides, *constants]
    kernel = merge_triton._merge
    signature, constexprs, attributes = {}, {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, values, strict=True)):
        if isinstance(value, torch.Tensor):
            signature[name], attributes[i,] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif value == 1 or i >= len(values) - len(constants):
            signature[name], constexprs[i,] = "constexpr", value
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs, attributes)


def ptxas(ptx: str, capability: int, folder: Path) -> str:
    """Report of NVIDIA's assembler on a kernel: registers and spills."""
    name = "ptxas-blackwell" if capability >= 100 else "ptxas"
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not program.exists():  # one assembler serves every architecture
        program = program.with_name("ptxas")
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    command = [str(program), "-v", "--gpu-name", target.group(1), str(file), "-o", "/dev/null"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


LAYOUTS = ("token", "lse by head", "head")


def tensors(shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str) -> tuple[torch.Tensor, ...]:
    """`out` and `lse` of both parts, without memory.

    Args: layout: how kernels return a part: "token": [b, s, h, d] and [b, s, h]; "lse by head": the lse [b, h, s], as
        flash kernels do; "head": `b`'s out [b, h, s, d], too.
    """
    batch, tokens, heads, head_dim = shape
    a_out, b_out = torch.empty(shape, device="meta"), torch.empty(shape, dtype=dtype, device="meta")
    if layout == "token":
        return a_out, torch.empty(shape[:3], device="meta"), b_out, torch.empty(shape[:3], device="meta")
    a_lse, b_lse = (torch.empty(batch, heads, tokens, device="meta").transpose(1, 2) for _ in range(2))
    if layout == "head":
        b_out = torch.empty(batch, heads, tokens, head_dim, dtype=dtype, device="meta").transpose(1, 2)
    return a_out, a_lse, b_out, b_lse


SHAPES = {
    "128 dims": (1, 4096, 24, 128),
    "64 dims, tokens that 16 does not divide": (2, 1001, 12, 64),
    "head dim that is no power of 2": (1, 4096, 3, 72),
    "odd head dim": (1, 77, 3, 45),
    "256 dims": (1, 4096, 8, 256),
    "one token, one head": (1, 1, 1, 128),
    "strides beyond 32 bits": (2, 2**21, 16, 128),
}


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_variant_compiles_within_its_registers(
    capability: int, shape: tuple[int, int, int, int], tmp_path: Path
) -> None:
    rows = "aligned" if shape[-1] % 16 == 0 else "other"
    for dtype, layout in product(POINTERS, LAYOUTS):
        given = source(*tensors(shape, dtype, layout))
        compiled = triton.compile(given, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]
        report = ptxas(compiled.asm["ptx"], capability, tmp_path)
        registers = re.search(r"Used (\d+) registers", report)
        assert registers is not None, report
        assert int(registers.group(1)) <= MAX_REGISTERS[rows], (dtype, layout, report)
        spilled_bytes = max(map(int, re.findall(r"(\d+) bytes spill", report)))
        assert spilled_bytes <= (0 if rows == "aligned" else 8), (dtype, layout, report)


def test_aligned_tensors_move_16_bytes_at_a_time() -> None:
    given = source(*tensors((1, 4096, 24, 128), torch.float32, "token"))
    ptx = triton.compile(given, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx
