"""Keep optimizers on the weights of a module when set-up replaces those by shards, or by weights with storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer


class ReplacedWeights:
    """Map from parameters that a module had to those that took their place."""

    def __init__(self) -> None:
        # By id of the parameter that was replaced. The weak reference shows whether the id is still that parameter's.
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
        """Replace the parameters of an optimizer that was made before they were replaced.

        Raises: ValueError: it has state for one of them, because it has taken steps.
        """
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                old, new = self._replaced.get(id(parameter), (None, None))
                if old is None or old() is not parameter:
                    continue
                if parameter in optimizer.state:
                    raise ValueError(
                        f"{type(optimizer).__name__} has a state for weights that are sharded only now: set it up "
                        "before its first step, or load its state after fabric.setup"
                    )
                group["params"][i] = new
