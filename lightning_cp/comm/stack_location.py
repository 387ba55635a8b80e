"""What a thread of a rank is doing, read from its stack: the line and the collective.

Only code and line numbers are read: `f_locals` of a frame that runs in another thread ends the process (SIGSEGV).
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch import nn

_OURS = str(Path(__file__).parent)
_TORCHS = (str(Path(dist.__file__).parent), str(Path(nn.parallel.__file__).parent))
_PACKAGE, _STDLIB = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")
BACKWARD = "_engine_run_backward"  # beneath it, in C++, gradients are averaged
_DETOURS = ("wrapper", "inner", "_call_impl", "_wrapped_call_impl")


@dataclass(frozen=True)
class StackLocation:
    """What a rank is doing: the line (of the user's code, where it is in a collective), module, and collective."""

    line: str
    module: str = ""
    collective: str = ""

    def describe(self) -> str:
        """What comes after "rank 1 "."""
        where = f", {self.module}" if self.module else ""
        if self.collective:
            return f"in {self.collective}{where} ({self.line})"
        return f"in no collective{where} ({self.line})"


def locate_stack(frame: FrameType, module: str) -> StackLocation:
    """Where a stopped thread is, from its innermost frame, and the module that it was in last."""
    collective = _collective_of(frame)
    at = next((outer for outer in _outward(frame) if collective and _is_users(outer)), frame)
    line = f"{'/'.join(Path(at.f_code.co_filename).parts[-2:])}:{at.f_lineno} in {at.f_code.co_name}"
    return StackLocation(line, module, collective)


def _collective_of(frame: FrameType) -> str:
    name = name_of_collective(frame)
    backward = any(outer.f_code.co_name == BACKWARD for outer in _outward(frame))
    if not name and frame.f_code.co_name == BACKWARD:
        return "backward, where gradients are averaged"
    return f"{name} in backward" if name and backward else name


def name_of_collective(frame: FrameType) -> str:
    """What of `torch.distributed`, or of ours around it, is being called; "" where it is something else."""
    torchs = ours = ""
    for outer in _outward(frame):
        file, name = outer.f_code.co_filename, outer.f_code.co_name
        if file.startswith(_OURS):
            ours = outer.f_code.co_qualname
        elif file.startswith(_TORCHS) and not ours:
            torchs = torchs if name in _DETOURS else name
        else:
            break
    return f"{ours} ({torchs})" if ours and torchs else ours or torchs


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((_PACKAGE, _STDLIB, "<")) and "site-packages" not in file


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
