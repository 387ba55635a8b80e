"""What a thread of a rank is doing, read from its stack: the line, the module, the collective."""

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
class Place:
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


def place_of(frame: FrameType) -> Place:
    """Where a stopped thread is, from its innermost frame."""
    collective = _collective_of(frame)
    at = next((outer for outer in _outward(frame) if collective and _is_users(outer)), frame)
    line = f"{'/'.join(Path(at.f_code.co_filename).parts[-2:])}:{at.f_lineno} in {at.f_code.co_name}"
    return Place(line, _module_of(frame), collective)


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
            ours = getattr(outer.f_code, "co_qualname", name)
        elif file.startswith(_TORCHS) and not ours:
            torchs = torchs if name in _DETOURS else name
        else:
            break
    return f"{ours} ({torchs})" if ours and torchs else ours or torchs


def _module_of(frame: FrameType) -> str:
    found = modules_on(frame)
    if found is None:
        return ""
    inner, outer = found
    path = next((name for name, module in outer.named_modules() if module is inner), "")
    return f"{path} of {type(outer).__name__}" if path else type(outer).__name__


def modules_on(frame: FrameType) -> tuple[nn.Module, nn.Module] | None:
    """The innermost module whose forward is on the stack, and the outermost that is not torch's or Lightning's.

    In the backward of an attention: those of its forward.
    """
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    for around in _outward(frame):
        name = around.f_code.co_name
        if name == "forward":
            module = around.f_locals.get("self")
            if isinstance(module, nn.Module):
                inner = inner or module
                if type(module).__module__.partition(".")[0] not in ("torch", "lightning", "pytorch_lightning"):
                    outer = module
        elif name.endswith("_backward") and inner is None:
            noted = getattr(around.f_locals.get("ctx"), "module", None)
            if noted is not None and noted[0]() is not None and noted[1]() is not None:
                return noted[0](), noted[1]()
    return None if inner is None else (inner, outer or inner)


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((_PACKAGE, _STDLIB, "<")) and "site-packages" not in file


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
