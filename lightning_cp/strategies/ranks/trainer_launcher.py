"""Start the Trainer's ranks from a script, a notebook or a function, and return sharded weights as whole tensors."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_cp.compat import trainer_names
from lightning_cp.compat.trainer_names import WorkerOutput
from lightning_cp.strategies.ranks.launchers import StartsProcesses
from lightning_cp.strategies.ranks.sweep_ranks import StartsScripts
from lightning_cp.training.ema import full_tensor


class MultiProcessingLauncher(StartsProcesses, trainer_names.MultiProcessingLauncher):
    """The Trainer's launcher of processes. It returns sharded weights as whole tensors."""

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
    """The Trainer's launcher of scripts."""
