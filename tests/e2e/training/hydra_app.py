"""A user's own Hydra program that trains with a strategy of lightning_cp. Writes a line per rank to the job's folder.

python tests/e2e/training/hydra_app.py -m n=2,3 trainer=fabric
"""

import os
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

VARIABLES = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
store = ConfigStore.instance()
DEFAULTS = {"lr": 0.01, "n": 2, "method": None, "trainer": "fabric", "fails": "none", "text": "-", "model": {}}
store.store("conf", DEFAULTS)
store.store("wide", {"width": 4}, group="model")
store.store("narrow", {"width": 2}, group="model")


class Module(nn.Linear):
    """One linear layer."""


def with_fabric(config: Any, model: nn.Module) -> int:
    """Train one step with Fabric. Returns: the rank."""
    from lightning.fabric import Fabric

    from lightning_cp.fabric import ContextParallelStrategy

    strategy = ContextParallelStrategy(ring=config.n, start_method=config.method)
    fabric = Fabric(accelerator="cpu", devices=config.n, strategy=strategy)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=config.lr))
    fail(config, fabric.global_rank)
    fabric.backward(wrapped(torch.ones(1, model.in_features)).sum())  # type: ignore[arg-type]
    optimizer.step()
    return fabric.global_rank


class Fit(BoringModel):
    """Train the model's layer; a class of the module, because spawned ranks unpickle it."""

    def __init__(self, config: Any, model: nn.Module) -> None:
        super().__init__()
        self.config, self.layer = config, model

    def training_step(self, *_: Any) -> Any:
        fail(self.config, self.global_rank)
        return self.layer(torch.ones(1, self.layer.in_features)).sum()  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.config.lr)


def with_trainer(config: Any, model: nn.Module) -> int:
    """Train one step with the Trainer. Returns: the rank."""
    from lightning.pytorch import Trainer

    from lightning_cp.pytorch import ContextParallelStrategy

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet["limit_val_batches"] = 0
    strategy = ContextParallelStrategy(ring=config.n, start_method=config.method)
    trainer = Trainer(accelerator="cpu", devices=config.n, strategy=strategy, max_steps=1, **quiet)
    module = Fit(config, model)
    trainer.fit(module, module.train_dataloader())
    return int(trainer.global_rank)


def fail(config: Any, rank: int) -> None:
    """Raise an error on the ranks that `fails` names."""
    if str(config.fails) in (str(rank), "all"):
        raise ArithmeticError(f"rank {rank} fails")


@hydra.main(config_path=None, config_name="conf", version_base="1.3")
def main(config: Any) -> float:
    """Train, and write what this rank has seen."""
    if "LOCAL_RANK" not in os.environ:  # rank 0, before the launch
        left = [name for name in VARIABLES if name in os.environ]
        assert not left, left
        assert not torch.distributed.is_initialized()
    torch.manual_seed(0)
    model = Module(config.model.get("width", 3), 2)
    rank = {"fabric": with_fabric, "lightning": with_trainer}[config.trainer](config, model)
    weight = sum(p.double().norm().item() for p in model.parameters())
    folder = HydraConfig.get().runtime.output_dir
    number = HydraConfig.get().job.num
    line = f"{config.n} {config.lr:.8f} {weight:.12f} {config.text} {model.in_features} {number} {os.getcwd()}"
    Path(folder, f"rank_{rank}.txt").write_text(line)
    return weight


if __name__ == "__main__":
    main()
