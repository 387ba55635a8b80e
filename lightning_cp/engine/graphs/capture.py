"""Run the calls of a model in CUDA graphs, in a loop of one's own: `capture_forward`."""

from __future__ import annotations

from functools import cache

from torch import nn

from lightning_cp.engine.graphs import recorder
from lightning_cp.engine.graphs.forward import GraphedForward
from lightning_cp.engine.installed import installed_on
from lightning_cp.engine.rules.paths import unwrapped
from lightning_cp.errors import PlanError
from lightning_cp.undoable import Undo, intercept_calls


def capture_forward(model: nn.Module) -> Undo:
    """Run the calls of a parallel model without gradients in CUDA graphs. Its interface does not change.

    The first 2 calls with arguments of a form run eagerly, the third one is captured, and later ones are replayed: the
    inputs are copied, and the outputs are new tensors. Another form is another graph; a model keeps the 8 that were
    used last. A call that cannot be captured runs eagerly, and the reason is logged once. (`parallelize_pipeline` has
    this as `graphs=`.)

    Args: model: a model that `apply_context_parallel` has made parallel, on CUDA; degrees of 1 are possible.
    Returns: a function that frees the graphs and restores the calls. To move the model's weights, or to exchange them,
        call it before, and `capture_forward` again afterwards; otherwise calls run eagerly from then on.
    Ranks: all of the context group, also in every call, with the same settings and adapters.
    Raises: PlanError: the model is not parallel.
    """
    module = unwrapped(model)
    installed = installed_on(module)
    if installed is None:
        raise PlanError(
            f"{type(module).__name__} is not context-parallel: call apply_context_parallel first (degrees of 1 are "
            "possible)"
        )
    graphed = GraphedForward(installed, True, cache(recorder.recorder_for))
    restore = intercept_calls(module, graphed.run)

    def undo() -> None:
        restore()
        graphed.drop()

    return undo
