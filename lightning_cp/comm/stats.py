"""What a rank's own thread notes of itself, for the watch of stalls: it alone may know its module."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Module:
    """A module of a model; held weakly, so that a note keeps no model alive."""

    inner: weakref.ref[nn.Module]
    outer: weakref.ref[nn.Module]

    def describe(self) -> str:
        """`path of Class`; "" where it is gone."""
        inner, outer = self.inner(), self.outer()
        if inner is None or outer is None:
            return ""
        try:
            path = next((name for name, module in outer.named_modules() if module is inner), "")
        except RuntimeError:  # modules are being added, by the thread that is watched
            path = ""
        return f"{path} of {type(outer).__name__}" if path else type(outer).__name__


@dataclass
class CommStats:
    """One for each process.

    Attributes:
        wanted: whether there is a watch; else modules are not noted.
        collectives: how many were begun.
        sent_bytes: to others, by our own transfers.
        waited_s: for them to end, on the host.
        traced: whether exchanges and waits are marked for a profiler, which takes its time.
        module: where the thread is.
    """

    wanted: bool = False
    collectives: int = 0
    sent_bytes: int = 0
    waited_s: float = 0.0
    traced: bool = False
    module: Module | None = None

    def enter(self, module: nn.Module, model: nn.Module | None = None) -> None:
        """The thread is in `module` from now on. Args: model: that it is in; None: as before."""
        if not self.wanted or torch.compiler.is_compiling():
            return
        outer = weakref.ref(model) if model is not None else None if self.module is None else self.module.outer
        self.module = None if outer is None else Module(weakref.ref(module), outer)

    def leave(self) -> None:
        """The thread is in no model."""
        if self.wanted and not torch.compiler.is_compiling():
            self.module = None

    @contextmanager
    def again_in(self, module: Module | None) -> Iterator[None]:
        """Around a backward. Args: module: that was noted in its forward."""
        self.module = module
        try:
            yield
        finally:
            self.module = None

    def describe_module(self) -> str:
        """For the watch; "" for none."""
        module = self.module
        return "" if module is None else module.describe()


STATS = CommStats()
