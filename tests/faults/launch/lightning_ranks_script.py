"""Start ranks by Lightning's own launchers; each rank writes down on which addresses it listens.

Arguments: fabric, trainer or session; the strategy; the start method; the number of ranks; a folder.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.utilities import imports
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_cp import context_parallel_attention, fabric, pytorch
from lightning_cp.launch import stall
from tests.dist.lightning_ranks import QUIET
from tests.dist.module import Clips, TrainsWan
from tests.faults.launch.listening import listening

KINDS = {"cp": "ContextParallelStrategy", "cp_fsdp": "ContextParallelFSDPStrategy"}


def write_what_listens(folder: str, name: str = "") -> None:
    """Use a group of each kind, then write what this rank listens on, and with which variables."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_rank(), group=dist.new_group())
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LIGHTNING_CP_LISTENER")
    found = {"listens": listening("self"), "met": everyone, "variables": [os.environ.get(name) for name in names]}
    Path(folder, f"{name}{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()


def attend(ours: Fabric, folder: str, name: str = "") -> None:
    """A rank of Fabric."""
    strategy: Any = ours.strategy
    x = torch.randn(1, 4, 2, 8)
    context_parallel_attention(x, x, x, parallel_config=strategy.context.config)
    write_what_listens(folder, name)


class Writes(TrainsWan):
    """A rank of the Trainer."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self) -> None:
        write_what_listens(self.folder)


def main(flavour: str, kind: str, method: str, ranks: int, folder: str) -> None:
    """Run what the arguments name."""
    warnings.simplefilter("ignore")
    settings: dict[str, Any] = {"ring": ranks, "start_method": method}
    if flavour == "trainer":
        module: LightningModule = Writes(folder)
        strategy = getattr(pytorch, KINDS[kind])(**settings)
        trainer = Trainer(accelerator="cpu", devices=ranks, strategy=strategy, max_steps=1, **QUIET)
        trainer.fit(module, DataLoader(Clips(4), batch_size=2))
    elif flavour == "fabric":
        ours = Fabric(accelerator="cpu", devices=ranks, strategy=getattr(fabric, KINDS[kind])(**settings))
        if method == "popen":
            ours.launch()
            attend(ours, folder)
        else:
            ours.launch(attend, folder)
            Path(folder, "parent.json").write_text(json.dumps(listening("self")))
    else:
        session(kind, ranks, folder)


def session(kind: str, ranks: int, folder: str) -> None:
    """One rank in this process twice, as in the cells of a notebook, and then forked ranks."""
    imports._IS_INTERACTIVE = True
    for name in ("first_", "second_"):
        ours = Fabric(accelerator="cpu", devices=1, strategy=getattr(fabric, KINDS[kind])())
        ours.launch(attend, folder, name)
        stall.stop_watch()
        dist.destroy_process_group()
    for name in ("", "again_"):
        ours = Fabric(accelerator="cpu", devices=ranks, strategy=getattr(fabric, KINDS[kind])(ring=ranks))
        ours.launch(attend, folder, name)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
