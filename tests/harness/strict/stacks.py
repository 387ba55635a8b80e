"""Where the threads of a rank are, and whether it works."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType

from tests.harness.strict.messages import Look

_ROOT = Path(__file__).parents[3]


def where(frame: FrameType | None, most: int = 5) -> str:
    """Return the lines of the repository that run in a thread, innermost first, without those of the harness."""
    found = list[str]()
    while frame is not None and len(found) < most:
        path = frame.f_code.co_filename
        if path.startswith(str(_ROOT)) and not path.startswith(str(Path(__file__).parent)):
            found.append(f"{os.path.relpath(path, _ROOT)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)


def look() -> Look:
    """Return the state of this process."""
    frames = sys._current_frames()
    stacks = ((thread.name, where(frames.get(thread.ident or 0), 12)) for thread in threading.enumerate())
    text = "\n".join(f"    {name}: {lines}" for name, lines in stacks if lines)
    return Look(any(map(_works, Path("/proc/self/task").iterdir())), text)


def _works(thread: Path) -> bool:
    """Return True if a thread computes, waits for a core or a disk, or has a child process; not for this thread."""
    if thread.name == str(threading.get_native_id()):
        return False
    try:
        state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
        return state in "RD" or bool((thread / "children").read_text())
    except OSError:  # it has ended
        return True
