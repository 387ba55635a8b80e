"""What works here: versions, devices, kernels, and each mode of attention tried on 2 and 3 ranks.

    python recipes/doctor.py

Takes under a minute on two CPU cores, needs no GPU, and ends with a verdict; the exit code is 1 where something that
should work does not.
"""

import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from lightning_cp.launch import Job, LocalLauncher, Machine, external_place

PACKAGES = ("lightning_cp", "torch", "diffusers", "lightning", "hydra-core", "omegaconf", "flash-attn", "peft")
WORLDS = (2, 3)
LIMIT_S = 25  # for each number of ranks
TOLERANCE = 1e-10  # float64, against plain softmax attention


def try_modes(config: DictConfig) -> None:
    """What every rank does: each mode forward and backward; the first one writes errors and milliseconds."""
    import json

    import torch
    import torch.distributed as dist

    from lightning_cp import context_parallel_attention
    from lightning_cp.benchmark.subject import modes

    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 64 * world + 5, 6, 32, generator=generator, dtype=torch.float64) for _ in range(3)]
    expected = _forward_backward(torch.nn.functional.scaled_dot_product_attention, whole, transposed=True)
    tried = {}
    for name, settings in modes(world).items():

        def attend(q: Any, k: Any, v: Any, settings: Any = settings) -> Any:
            return context_parallel_attention(q, k, v, parallel_config=settings)

        local = [torch.tensor_split(x, world, dim=1)[rank] for x in whole]
        _forward_backward(attend, local, transposed=False)  # the first call builds groups
        dist.barrier()
        started = time.perf_counter()
        found = _forward_backward(attend, local, transposed=False)
        elapsed = time.perf_counter() - started
        pairs = zip(found, expected, strict=True)
        errors = [float((a - torch.tensor_split(b, world, dim=1)[rank]).abs().max()) for a, b in pairs]
        worst = torch.tensor([max(errors), elapsed], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        tried[name] = worst.tolist()
    if rank == 0:
        Path(config.result).write_text(json.dumps(tried))


def _forward_backward(attend: Any, tensors: list[Any], *, transposed: bool) -> list[Any]:
    import torch

    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    inputs = [x.transpose(1, 2) for x in leaves] if transposed else leaves
    out = attend(*inputs)
    out = out.transpose(1, 2) if transposed else out
    grads = torch.autograd.grad(out.square().sum(), leaves)
    return [out.detach(), *grads]


def show_surroundings(console: Console) -> None:
    """Versions, devices, backends and kernels."""
    import torch

    from lightning_cp.kernels import KERNEL_NAMES, choose_kernel

    table = Table(title="here", title_justify="left", show_header=False)
    table.add_row("system", f"{platform.platform()}, Python {platform.python_version()}")
    table.add_row("packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    machine = Machine.this()
    table.add_row("devices", f"{machine.cores} CPU cores, {machine.gpus} CUDA device(s)")
    place = external_place(os.environ)
    table.add_row("launcher", "our own" if place is None else f"{place.launcher}, {place.world_size} ranks")
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(torch.distributed, f"is_{name}_available")()]
    table.add_row("backends", ", ".join(backends))
    for device in ("cpu", *(["cuda"] if machine.gpus else [])):
        for dtype in (torch.float32, torch.bfloat16):
            query = torch.empty(1, 8, 4, 64, device=device, dtype=dtype)
            usable = [name for name in KERNEL_NAMES[1:] if _takes(choose_kernel, name, query)]
            chosen = choose_kernel("auto", query, None).name
            table.add_row(f"kernels, {device}, {dtype}".replace("torch.", ""), f"{', '.join(usable)}; auto is {chosen}")
    console.print(table)


def _takes(choose: Any, name: str, query: Any) -> bool:
    try:
        choose(name, query, None)
    except ValueError:
        return False
    return True


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "–"


def self_test(console: Console) -> list[str]:
    """Runs every mode on 2 and 3 ranks of this CPU. Returns: what went wrong."""
    import json

    table = Table(title="attention, forward and backward, float64 on CPU", title_justify="left")
    for name in ("ranks", "mode", "largest error", "milliseconds", ""):
        table.add_column(name)
    problems = []
    for world in WORLDS:
        with tempfile.TemporaryDirectory(prefix="lightning_cp_") as folder:
            result, settings = Path(folder) / "result.json", Path(folder) / "settings.yaml"
            OmegaConf.save({"result": str(result)}, settings)
            job = Job(f"{os.path.abspath(__file__)}:try_modes", settings, world, Path(folder) / "logs", threads=1)
            done = LocalLauncher(limit_s=LIMIT_S).launch(job)
            tried = json.loads(result.read_text()) if result.is_file() else {}
        if done.was_stopped:
            sys.exit(done.exit_code)
        if done.failure is not None or not tried:
            said = "nothing came of it" if done.failure is None else done.failure.message
            problems.append(f"{world} ranks: {said}")
            table.add_row(str(world), "all", "–", "–", "[red]failed")
        for name, (error, seconds) in tried.items():
            exact = error < TOLERANCE
            verdict = "[green]exact" if exact else "[red]wrong"
            table.add_row(str(world), name, f"{error:.0e}", f"{seconds * 1000:.0f}", verdict)
            if not exact:
                problems.append(f"{name} on {world} ranks is off by {error:.0e}, more than {TOLERANCE:.0e}")
    console.print(table)
    return problems


def main() -> int:
    """Looks, tries, and says what it thinks."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    started = time.perf_counter()
    show_surroundings(console)
    problems = self_test(console)
    for problem in problems:
        console.print(f"[red]problem:[/] {problem}")
    verdict = "something is wrong, see above" if problems else "all is well: context parallelism is exact here"
    console.print(f"{verdict} ({time.perf_counter() - started:.0f} s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
