"""Set modules to eval mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set eval mode inside the context, and restore the mode of every submodule after it."""
    were_training = [inner for inner in module.modules() if inner.training]
    module.eval()
    try:
        yield
    finally:
        for inner in were_training:
            inner.training = True
