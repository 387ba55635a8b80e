"""Share weights that hooks of the Trainer load on one rank, before callbacks copy them and before training starts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_cp.comm.agree import gather_objects
from lightning_cp.strategies.mixin import ContextParallelMixin
from lightning_cp.strategies.weights.initial import share_initial_weights

_AFTER_FIT_START = "run-stage"  # name of the Trainer's barrier between on_fit_start and on_train_start


class SharesLateWeights(ContextParallelMixin):
    """Share rank 0's weights again after `on_fit_start` and after `on_train_start`.

    Modules that callbacks hold are shared too: averages such as `WeightAveraging`, and frozen copies of the weights.
    """

    def barrier(self, name: Any = None, *args: Any, **settings: Any) -> None:
        """Wait for all ranks. The Trainer's barrier before a fit also shares weights."""
        super().barrier(name, *args, **settings)  # type: ignore[misc]
        if name == _AFTER_FIT_START:
            self._share_late_weights()

    def on_train_start(self) -> None:
        """Share weights that a hook has loaded in `on_train_start`."""
        super().on_train_start()  # type: ignore[misc]
        self._share_late_weights()

    def _share_late_weights(self) -> None:
        module = self._lightning.lightning_module
        fits = module.trainer.state.fn == TrainerFn.FITTING
        if fits and dist.is_initialized() and dist.get_world_size() > 1:
            share_initial_weights(module, self._lightning.root_device)
            share_initial_weights(_ModulesOfCallbacks(module), self._lightning.root_device)


class _ModulesOfCallbacks(nn.Module):
    """Modules that are attributes of callbacks on every rank, without those in the LightningModule.

    Ranks: the whole world.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        inside = set(module.modules())
        modules = {
            f"{index}_{type(callback).__name__}_{name}": value
            for index, callback in enumerate(module.trainer.callbacks)
            for name, value in vars(callback).items()
            if isinstance(value, nn.Module) and value not in inside
        }
        names = gather_objects(list(modules), dist.group.WORLD)
        for name, value in modules.items():
            if all(name in one for one in names):  # a module on one rank only, such as a metric's, is no copy
                self.add_module(name, value)
