"""Communication statistics of a process and the module it is in, read by the stall watch and the benchmark."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

_UNRECORDED = nullcontext()


@dataclass(frozen=True)
class RecordedModule:
    """A module of a model, held by weak references so that the statistics keep no model alive.

    Attributes:
        inner: the module.
        outer: the model that contains it.
        is_replayed: the host has started to replay a CUDA graph of the model, and has gone on.
    """

    inner: weakref.ref[nn.Module]
    outer: weakref.ref[nn.Module]
    is_replayed: bool = False

    def describe(self) -> str:
        """Return "path of Class" or "after the replay of a CUDA graph of Class"; "" if the model no longer exists."""
        inner, outer = self.inner(), self.outer()
        if inner is None or outer is None:
            return ""
        try:
            path = next((name for name, module in outer.named_modules() if module is inner), "")
        except RuntimeError:  # the watched thread is adding modules
            path = ""
        if self.is_replayed:
            return f"after the replay of a CUDA graph of {type(outer).__name__}"
        return f"{path} of {type(outer).__name__}" if path else type(outer).__name__


@dataclass
class CommStats:
    """Communication statistics of one process.

    Attributes:
        records_modules: True while a stall watch runs; modules are recorded only then.
        collectives: number of calls of `comm.transfer.exchange`.
        sent_bytes: bytes sent to other ranks by `comm.transfer.exchange`.
        waited_s: seconds that the host waited for these transfers.
        traced: True: mark exchanges and waits for the profiler, which costs time.
        module: module that the thread is in; None: no module.
    """

    records_modules: bool = False
    collectives: int = 0
    sent_bytes: int = 0
    waited_s: float = 0.0
    traced: bool = False
    module: RecordedModule | None = None

    def enter(self, module: nn.Module, model: nn.Module | None = None) -> None:
        """Record that the thread entered `module`.

        Args: model: model that contains it; None: the model recorded before.
        """
        if not self.records_modules or torch.compiler.is_compiling():
            return
        outer = weakref.ref(model) if model is not None else None if self.module is None else self.module.outer
        self.module = None if outer is None else RecordedModule(weakref.ref(module), outer)

    def note_replay(self, model: nn.Module) -> None:
        """Record that a CUDA graph of `model` is replayed. The GPU may compute it until the next module is entered."""
        if self.records_modules:
            self.module = RecordedModule(weakref.ref(model), weakref.ref(model), is_replayed=True)

    def leave(self) -> None:
        """Record that the thread left the model."""
        if self.records_modules and not torch.compiler.is_compiling():
            self.module = None

    def inside_module(self, module: RecordedModule | None) -> AbstractContextManager[object]:
        """Record `module` for the duration of a backward. Args: module: module recorded in the forward."""
        return _UNRECORDED if module is None and self.module is None else self._inside(module)

    @contextmanager
    def _inside(self, module: RecordedModule | None) -> Iterator[None]:
        self.module = module
        try:
            yield
        finally:
            self.module = None

    def describe_module(self) -> str:
        """Return the description of the current module; "" for none."""
        module = self.module
        return "" if module is None else module.describe()


STATS = CommStats()


@contextmanager
def traced(*, memory: bool = False) -> Iterator[profile]:
    """Profile the code in the context, including GPU work that it launched. Args: memory: record allocations too."""
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with profile(activities=[ProfilerActivity.CPU, *gpu], profile_memory=memory) as profiler:
        STATS.traced = True
        try:
            yield profiler
            if gpu:
                torch.cuda.synchronize()
        finally:
            STATS.traced = False
