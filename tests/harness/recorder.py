"""A stand-in for CUDA graphs on CPU: a recording computes the same function again, from the same input tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_cp.compat.torch_names import TorchDispatchMode, tree_flatten
from lightning_cp.engine.graphs.recorder import Recording


@dataclass
class Share:
    """A timing that was measured before."""

    value: float | None

    def host_share(self) -> float | None:
        return self.value


class StandIn:
    """Records functions on CPU. A replay writes the tensors of the recorded output anew.

    Attributes:
        num_bytes: memory that each next recording takes.
        share: host share that each next timing returns.
        fails: raised by the next captures.
        captures, replays, freed: how often each was done.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device, self.total_bytes = torch.device("cpu"), 8000
        self.num_bytes, self.share = 10, 1.0
        self.fails: Exception | None = None
        self.captures = self.replays = self.freed = 0

    def capture(self, run: Callable[[], Any]) -> Recording:
        output = run()
        if self.fails is not None:  # after the exchanges with other ranks, which are part of `run` here
            raise self.fails
        self.captures += 1
        written = [x for x in tree_flatten(output)[0] if isinstance(x, torch.Tensor)]

        def replay() -> None:
            self.replays += 1
            for x, new in zip(written, (x for x in tree_flatten(run())[0] if isinstance(x, torch.Tensor)), strict=True):
                x.copy_(new)

        def free() -> None:
            self.freed += 1

        for x in written:
            x.fill_(12345.0)  # the capture of a CUDA graph computes nothing
        return Recording(output, replay, free, self.num_bytes)

    def stream(self) -> int:
        return 0

    def timed(self, run: Callable[[], Any]) -> tuple[Any, Share]:
        return run(), Share(self.share)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, output))
        return output


class OperatorsStandIn(StandIn):
    """Repeats the operators of a function, as a CUDA graph does, and none of its Python code."""

    def capture(self, run: Callable[[], Any]) -> Recording:
        with _Operators() as operators:
            output = run()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            for operator, args, kwargs, written in operators.calls:
                for x, new in zip(tree_flatten(written)[0], tree_flatten(operator(*args, **kwargs))[0], strict=True):
                    if isinstance(x, torch.Tensor) and x.data_ptr() != new.data_ptr():
                        x.copy_(new)

        return Recording(output, replay, lambda: None, self.num_bytes)
