"""Measure the time that a pipeline takes to encode, denoise and decode."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_cp.pipelines.state import parallel_state
from lightning_cp.undoable import intercept_calls


@dataclass(eq=False)
class StageTimes:
    """Seconds of each stage on this rank, summed over the calls of a parallel pipeline.

    Encoding ends at the first transformer call; decoding begins after the last one. With stages of blocks, the wait for
    the last stage's outputs counts as decoding.

    Attributes:
        encode_s, denoise_s, decode_s: seconds per stage.
        fastest_call_s: seconds of the fastest call. (The first one also compiles kernels and connects ranks.)
    """

    encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0
    fastest_call_s: float = math.inf
    _marks: list[_Mark] = field(default_factory=list)

    def watch(self, pipe: Any) -> None:
        """Measure all later calls of a pipeline. Raises: ValueError: it is not parallel."""
        for name in parallel_state(pipe).transformers:
            intercept_calls(pipe.components[name], self._step)
        intercept_calls(pipe, self._call)

    def _step(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._marks:
            self._marks.append(_Mark())
        result = call(*args, **kwargs)
        self._marks[1:] = [_Mark()]
        return result

    def _call(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._marks, started = [], _Mark()
        result = call(*args, **kwargs)
        ended, (first, last) = _Mark(), self._marks or (started, started)
        self.encode_s += first.since(started)
        self.denoise_s += last.since(first)
        self.decode_s += ended.since(last)
        self.fastest_call_s = min(self.fastest_call_s, ended.since(started))
        return result


class _Mark:
    """A point in time; on CUDA, of the current stream. The host does not wait for the device."""

    def __init__(self) -> None:
        self._time_s, self._event = time.perf_counter(), None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def since(self, earlier: _Mark) -> float:
        """Return the seconds since an earlier mark. Waits on CUDA until the stream has reached this one."""
        if self._event is None or earlier._event is None:
            return self._time_s - earlier._time_s
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000
