"""Context parallelism for Lightning's `Trainer`."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.ddp import DDPStrategy
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
            self._say_what_is_parallel(installed)
