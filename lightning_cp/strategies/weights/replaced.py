"""Update optimizers when setup replaces a module's weights by shards, or by weights with storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer


class ReplacedWeights:
    """Map from replaced parameters to the new ones."""

    def __init__(self) -> None:
        # Key: id of the replaced parameter. The weak reference detects an id that was reused by another object.
        self._replaced: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Record which parameters of `module` are replaced inside the context, by name."""
        before = dict(module.named_parameters())
        yield
        for name, parameter in module.named_parameters():
            if before.get(name, parameter) is not parameter:
                self._replaced[id(before[name])] = (weakref.ref(before[name]), parameter)

    def update(self, optimizer: Optimizer) -> None:
        """Replace parameters in an optimizer that was created before setup.

        Raises: ValueError: the optimizer already has state for one of them.
        """
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                old, new = self._replaced.get(id(parameter), (None, None))
                if old is None or old() is not parameter:
                    continue
                if parameter in optimizer.state:
                    raise ValueError(
                        f"{type(optimizer).__name__} already has state for weights that setup has just replaced: call "
                        "fabric.setup before its first step, or load its state after fabric.setup"
                    )
                group["params"][i] = new
