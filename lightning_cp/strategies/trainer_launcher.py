"""Start the Trainer's ranks from a script, a notebook or a function, and return sharded weights as whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_cp.compat import trainer_names
from lightning_cp.compat.trainer_names import WorkerOutput
from lightning_cp.strategies.notebook import ready_to_launch
from lightning_cp.strategies.sweep_ranks import StartsScripts
from lightning_cp.training.ema import full_tensor


class MultiProcessingLauncher(trainer_names.MultiProcessingLauncher):
    """The Trainer's launcher: prepare this process, listen on the loopback interface only, return whole weights."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run a function on all ranks. Raises: RuntimeError: see `ready_to_launch`."""
        strategy: Any = self._strategy
        environment = strategy.cluster_environment
        with (
            ready_to_launch(self._start_method, environment),
            strategy.local_ranks.for_processes(environment, num_nodes=strategy.num_nodes),
        ):
            return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> WorkerOutput | None:
        device, is_first = self._strategy.root_device, self._strategy.global_rank == 0

        def gather(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
            for name, x in state.items():
                if isinstance(x, DTensor):  # on the CPU since the end of the fit
                    whole = full_tensor(x.to(device))
                    state[name] = whole.cpu() if is_first else None

        handle = trainer.lightning_module.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            handle.remove()


class ScriptLauncher(StartsScripts, trainer_names.SubprocessScriptLauncher):
    """The Trainer's launcher of scripts; ranks listen on the loopback interface only. See `StartsScripts`."""
