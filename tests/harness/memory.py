"""This process's host memory, and its peak."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path


class MemoryPeak:
    """Measure the peak memory in a thread, every millisecond, in bytes above the start.

    Attributes:
        anonymous: peak without the pages of mapped files.
        resident: peak with the pages of mapped files.
    """

    def __enter__(self) -> MemoryPeak:
        self.anonymous = self.resident = 0.0
        self._start = _held()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        last = False
        while not last:
            last = self._done.wait(0.001)
            anonymous, resident = _held()
            self.anonymous = max(self.anonymous, anonymous - self._start[0])
            self.resident = max(self.resident, resident - self._start[1])


def settled_bytes() -> int:
    """Return the resident memory, without garbage and without what the C library keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _held()[1]


def _held() -> tuple[int, int]:
    """Anonymous and resident memory of this process, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024, int(fields["VmRSS"].split()[0]) * 1024
