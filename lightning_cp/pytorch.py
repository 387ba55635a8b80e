"""Context parallelism for Lightning's `Trainer`."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_cp.flavour import ContextParallelFlavour


class ContextParallelStrategy(ContextParallelFlavour, DDPStrategy):
    """`Trainer(strategy=ContextParallelStrategy(ring=2))`: the transformers of a LightningModule become parallel.

    Args: see `ContextParallelFlavour`.
    """

    @override
    def setup(self, trainer: Trainer) -> None:
        """Make the module's transformers context-parallel, then what Lightning does."""
        assert self.lightning_module is not None, "connected before"
        installed = self._wrap(self.lightning_module)
        super().setup(trainer)
        with self.precision_plugin.forward_context():
            line = self.context.describe(installed, ranks_per_node=self.num_processes)
        if line is not None:
            rank_zero_info(line)
