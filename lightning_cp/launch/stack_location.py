"""Locate a thread of a rank from its stack: the source line and the collective.

Only code objects and line numbers are read: reading `f_locals` of a frame that runs in another thread ends the process
(SIGSEGV).
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch import nn

_COMM_DIR = str(Path(__file__).parents[1] / "comm")
_TORCH_DIRS = (str(Path(dist.__file__).parent), str(Path(nn.parallel.__file__).parent))
_PACKAGE_DIR, _STDLIB_DIR = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")
BACKWARD = "_engine_run_backward"  # torch function that runs backward in C++; DDP and FSDP average gradients inside it
_WRAPPERS = ("wrapper", "inner", "_call_impl", "_wrapped_call_impl")


@dataclass(frozen=True)
class StackLocation:
    """Source line (of the user's code if the thread is in a collective), module and collective of a thread."""

    line: str
    module: str = ""
    collective: str = ""

    def describe(self) -> str:
        """Return the text that follows "rank 1 is" or "rank 1 waits" in a message."""
        module = f", {self.module}" if self.module else ""
        if self.collective:
            return f"in {self.collective}{module} ({self.line})"
        return f"in no collective{module} ({self.line})"


def locate_stack(frame: FrameType, module: str) -> StackLocation:
    """Return the location of a thread.

    Args:
        frame: its innermost frame.
        module: description of the last module it entered.
    """
    collective = _collective_of(frame)
    at = next((outer for outer in _frames_outward(frame) if collective and _is_user_code(outer)), frame)
    line = f"{'/'.join(Path(at.f_code.co_filename).parts[-2:])}:{at.f_lineno} in {at.f_code.co_name}"
    return StackLocation(line, module, collective)


def _collective_of(frame: FrameType) -> str:
    name = name_of_collective(frame)
    backward = any(outer.f_code.co_name == BACKWARD for outer in _frames_outward(frame))
    if not name and frame.f_code.co_name == BACKWARD:
        return "backward, where gradients are averaged"
    return f"{name} in backward" if name and backward else name


def name_of_collective(frame: FrameType) -> str:
    """Return the `torch.distributed` function in progress and the function here that called it; "" if there is none."""
    torch_name = comm_name = ""
    for outer in _frames_outward(frame):
        file, name = outer.f_code.co_filename, outer.f_code.co_name
        if file.startswith(_COMM_DIR):
            comm_name = outer.f_code.co_qualname
        elif file.startswith(_TORCH_DIRS) and not comm_name:
            torch_name = torch_name if name in _WRAPPERS else name
        else:
            break
    return f"{comm_name} ({torch_name})" if comm_name and torch_name else comm_name or torch_name


def _is_user_code(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((_PACKAGE_DIR, _STDLIB_DIR, "<")) and "site-packages" not in file


def _frames_outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
