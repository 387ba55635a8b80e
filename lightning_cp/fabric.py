"""Context parallelism for `lightning.fabric.Fabric`."""

from __future__ import annotations

from lightning.fabric.strategies.ddp import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_cp.flavour import ContextParallelFlavour


class ContextParallelStrategy(ContextParallelFlavour, DDPStrategy):
    """`Fabric(strategy=ContextParallelStrategy(ring=2))`: `fabric.setup` makes the transformers of a module parallel.

    Args: see `ContextParallelFlavour`.
    """

    @override
    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Make the module's transformers context-parallel, and average its gradients over all ranks."""
        installed = self._wrap(module)
        with self.precision.forward_context():
            self._say_what_is_parallel(installed)
        return super().setup_module(module)
