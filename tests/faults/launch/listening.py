"""Ranks that write down on which addresses they listen."""

import json
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_cp.recipes.runs.command import reads_settings

_LISTENS = "0A"
_ADDRESSES = {"0100007F": "127.0.0.1", "00000000000000000000000001000000": "::1"}


def listening(pid: int | str) -> list[str]:
    """Addresses on which a process listens, one for each socket; in hexadecimal if they are no loopback address."""
    return sorted(address for address, _ in _sockets(pid))


def listening_ports(pid: int | str) -> set[int]:
    """Ports on which a process listens."""
    return {port for _, port in _sockets(pid)}


def _sockets(pid: int | str) -> list[tuple[str, int]]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except FileNotFoundError:  # closed since
            continue
    lines = [line.split() for name in ("tcp", "tcp6") for line in _lines(Path(f"/proc/{pid}/net/{name}"))]
    found = [fields[1].split(":") for fields in lines if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in inodes]
    return [(_ADDRESSES.get(address, address), int(port, 16)) for address, port in found]


def _lines(table: Path) -> list[str]:
    return table.read_text().splitlines()[1:] if table.is_file() else []


@reads_settings
def write_listening(config: DictConfig) -> None:
    """Set up a strategy with its stall watch, use all groups, and meet a second time."""
    import torch
    import torch.distributed as dist
    from lightning.fabric import Fabric

    from lightning_cp import context_parallel_attention
    from lightning_cp.fabric import ContextParallelStrategy
    from lightning_cp.launch import stall
    from lightning_cp.launch.rendezvous import init_process_group

    world = int(os.environ["WORLD_SIZE"])
    strategy: Any = ContextParallelStrategy(ring=world, stall_s=30)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    x = torch.randn(1, 4, 2, 8)
    context_parallel_attention(x, x, x, parallel_config=strategy.context.config)
    dist.barrier(dist.new_group())
    found: dict[str, Any] = {"first": listening("self")}
    found["stores"] = len({int(os.environ["MASTER_PORT"])} & listening_ports("self"))
    dist.barrier()
    stall.stop_watch()
    dist.destroy_process_group()

    init_process_group("gloo")
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, dist.get_rank())
    found["again"] = listening("self")
    dist.barrier()
    found["met"] = everyone
    Path(config.folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))


@reads_settings
def elsewhere(config: DictConfig) -> None:
    """Meet at another port than the launcher's, as a script that sets MASTER_PORT itself does."""
    import torch.distributed as dist

    os.environ["MASTER_PORT"] = str(config.port)
    dist.init_process_group("gloo")
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    found = [store.port, os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")]
    Path(config.folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
