"""Run a model in Lightning's precision, for sampling."""

from typing import Any

from lightning.fabric.plugins.precision import Precision
from torch import Tensor, nn
from typing_extensions import override


class WithPrecision(nn.Module):
    """Run the forward of a model in the precision of Fabric or the Trainer, without their wrapper for training.

    Args:
        model: the model, on its device, already converted by `precision.convert_module`.
        precision: `fabric.strategy.precision` or `trainer.precision_plugin`.
    """

    model: nn.Module
    precision: Precision

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.model, self.precision = model, precision

    @override
    def forward(self, *args: Any) -> Tensor:
        """Convert the inputs, run the model in the precision's context and convert its output, as Lightning does."""
        inputs = self.precision.convert_input(args)
        with self.precision.forward_context():
            out = self.model(*inputs)
        converted: Tensor = self.precision.convert_output(out)
        return converted
