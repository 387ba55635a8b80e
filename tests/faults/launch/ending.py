"""Ranks that are in collectives when one of them ends."""

import os
import sys

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from lightning_cp.launch.rendezvous import init_process_group
from lightning_cp.recipes.runs.command import reads_settings


@reads_settings
def end_in_collectives(config: DictConfig) -> None:
    """All-reduce without end; rank `rank` leaves after a few times in the way `how`."""
    init_process_group("gloo")
    x = torch.ones(1000)
    for step in range(100_000):
        if step == 5 and dist.get_rank() == config.rank:
            _end(config.how)
            return
        dist.all_reduce(x)
        x.fill_(1)


def _end(how: str) -> None:
    kind, _, number = how.partition(" ")
    if kind == "signal":
        os.kill(os.getpid(), int(number))
    elif kind == "_exit":
        os._exit(int(number))
    elif kind == "exit":
        sys.exit(int(number))
    elif kind == "raise":
        raise RuntimeError("raised on purpose")
    elif kind != "return":
        raise AssertionError(how)
