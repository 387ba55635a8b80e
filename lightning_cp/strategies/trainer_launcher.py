"""Start the Trainer's ranks from a notebook or a function, and return sharded weights as whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_cp.strategies.notebook import ready_to_launch
from lightning_cp.training.ema import whole_of


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """The Trainer's launcher; it prepares this process first, and returns sharded weights as whole tensors."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run a function on all ranks. Raises: RuntimeError: see `ready_to_launch`."""
        with ready_to_launch(self._start_method, self._strategy.cluster_environment):
            return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        device, is_first = self._strategy.root_device, self._strategy.global_rank == 0

        def gather(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
            for name, x in state.items():
                if isinstance(x, DTensor):  # on the CPU since the end of the fit
                    whole = whole_of(x.to(device))
                    state[name] = whole.cpu() if is_first else None

        handle = trainer.lightning_module.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            handle.remove()
