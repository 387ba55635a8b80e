"""Show versions, devices and kernels of this machine, and test each mode of attention on 2 and 3 ranks.

    lightning-cp doctor                 under a minute on two CPU cores; needs no GPU
    lightning-cp doctor timeout=120     on a busy machine: time limit in seconds for each number of ranks (25)

It ends with a verdict. Exit codes: 0: everything works; 1: something fails; 2: an argument is not valid; 3: the time
limit was exceeded, which can also mean that the machine is busy.
"""

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_cp.launch import FailureKind, Machine, launcher_env
from lightning_cp.recipes import terminal
from lightning_cp.recipes.runs.ranks import modes, on_ranks, run_on_ranks
from lightning_cp.recipes.settings.table import SettingsError
from lightning_cp.recipes.terminal import print_error, rich_text

PACKAGES = ("lightning_cp", "torch", "diffusers", "lightning", "hydra-core", "omegaconf", "peft")
WORLDS = (2, 3)
TIMEOUT_S = 25  # for each number of ranks
MAX_TIMEOUT_S = 86_400
PROBLEM, BAD_ARGUMENT, TIMED_OUT = 1, 2, 3  # exit codes
TOLERANCE = 1e-10  # float64, against plain softmax attention


@on_ranks
def try_modes(_: object) -> Iterator[tuple[str, float, float]]:
    """Run each mode forward and backward on every rank. A row: name, largest error and seconds."""
    import torch
    import torch.distributed as dist

    from lightning_cp.attention import context_parallel_attention

    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(2, 64 * world + 5, 6, 32, generator=generator, dtype=torch.float64) for _ in range(3)]
    expected = _forward_backward(torch.nn.functional.scaled_dot_product_attention, full, transposed=True)
    for name, settings in modes(world).items():

        def attend(q: Any, k: Any, v: Any, settings: Any = settings) -> Any:
            return context_parallel_attention(q, k, v, parallel_config=settings)

        local = [torch.tensor_split(x, world, dim=1)[rank] for x in full]
        _forward_backward(attend, local, transposed=False)  # the first call builds groups
        dist.barrier()
        started = time.perf_counter()
        actual = _forward_backward(attend, local, transposed=False)
        elapsed = time.perf_counter() - started
        pairs = zip(actual, expected, strict=True)
        errors = [float((a - torch.tensor_split(b, world, dim=1)[rank]).abs().max()) for a, b in pairs]
        worst = torch.tensor([max(errors), elapsed], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        yield name, float(worst[0]), float(worst[1])


def _forward_backward(attend: Any, tensors: list[Any], *, transposed: bool) -> list[Any]:
    import torch

    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    inputs = [x.transpose(1, 2) for x in leaves] if transposed else leaves
    out = attend(*inputs)
    out = out.transpose(1, 2) if transposed else out
    grads = torch.autograd.grad(out.square().sum(), leaves)
    return [out.detach(), *grads]


def show_environment(console: Console) -> None:
    """Print versions, devices, backends and kernels."""
    import torch

    from lightning_cp.kernels import KERNEL_NAMES, choose_kernel

    table = Table(title="this machine", title_justify="left", show_header=False)
    table.add_row("system", f"{platform.platform()}, Python {platform.python_version()}")
    table.add_row("packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    machine = Machine.this()
    table.add_row("devices", f"{machine.cores} CPU cores, {machine.gpus} CUDA device(s)")
    launcher = launcher_env(os.environ)
    table.add_row(
        "launcher",
        "none: the recipes start their own ranks"
        if launcher is None
        else f"{launcher.launcher}, {launcher.world_size} ranks",
    )
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(torch.distributed, f"is_{name}_available")()]
    table.add_row("backends", ", ".join(backends))
    for device in ("cpu", *(["cuda"] if machine.gpus else [])):
        for dtype in (torch.float32, torch.bfloat16):
            query = torch.empty(1, 8, 4, 64, device=device, dtype=dtype)
            usable = [name for name in KERNEL_NAMES[1:] if _is_usable(choose_kernel, name, query)]
            chosen = choose_kernel("auto", query, None).name
            table.add_row(f"kernels, {device}, {dtype}".replace("torch.", ""), f"{', '.join(usable)}; auto is {chosen}")
    console.print(table)


def _is_usable(choose: Any, name: str, query: Any) -> bool:
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


def self_test(console: Console, timeout_s: int) -> tuple[list[str], list[int]]:
    """Run every mode on 2 and 3 ranks of this CPU.

    Args: timeout_s: time limit in seconds for each number of ranks.
    Returns: the failures, and the numbers of ranks that did not finish in time.
    """
    table = Table(title="attention, forward and backward, float64 on CPU", title_justify="left")
    for name in ("ranks", "mode", "largest error", "milliseconds", ""):
        table.add_column(name)
    problems, timed_out = [], []
    for world in WORLDS:
        rows, outcome = run_on_ranks(try_modes, {}, world, limit_s=timeout_s)
        if outcome.was_stopped:
            sys.exit(outcome.exit_code)
        if outcome.failure is not None and outcome.failure.kind is FailureKind.TIMEOUT:
            timed_out.append(world)
            table.add_row(str(world), "all", "–", "–", "[yellow]not done")
        elif outcome.failure is not None or not rows:
            message = "no results were written" if outcome.failure is None else outcome.failure.message
            problems.append(f"{world} ranks: {message}")
            table.add_row(str(world), "all", "–", "–", "[red]failed")
        for name, error, seconds in rows:
            exact = error < TOLERANCE
            verdict = "[green]exact" if exact else "[red]wrong"
            table.add_row(str(world), name, f"{error:.0e}", f"{seconds * 1000:.0f}", verdict)
            if not exact:
                problems.append(f"{name} on {world} ranks is off by {error:.0e}, more than {TOLERANCE:.0e}")
    console.print(table)
    return problems, timed_out


def timeout_of(arguments: list[str]) -> int:
    """Read the command line. Returns: seconds for each number of ranks. Raises: SettingsError: it is not valid."""
    timeout_s = TIMEOUT_S
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key != "timeout":
            raise SettingsError(f"{argument} is not valid: the only setting is timeout=<seconds>")
        if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= MAX_TIMEOUT_S):
            raise SettingsError(
                f"timeout={value} is not valid: must be a whole number of seconds from 1 to {MAX_TIMEOUT_S}"
            )
        timeout_s = int(value)
    return timeout_s


def main() -> int:
    """Show the environment, test every mode, and print a verdict. Returns: the exit code."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        timeout_s = timeout_of(arguments)
    except SettingsError as error:
        print_error(error)
        return BAD_ARGUMENT
    console = terminal.console()
    started = time.perf_counter()
    show_environment(console)
    problems, timed_out = self_test(console, timeout_s)
    for problem in problems:
        console.print(f"[red]problem:[/] {rich_text(problem)}")
    for world in timed_out:
        console.print(f"[yellow]not done:[/] {world} ranks were still running after timeout={timeout_s} seconds")
    if problems:
        verdict, code = "something fails, see above", PROBLEM
    elif timed_out:
        longer = max(120, 2 * timeout_s)
        verdict = (
            "no verdict: the time limit was exceeded. "
            f"On a busy machine use timeout={longer}; if that is not enough, ranks hang"
        )
        code = TIMED_OUT
    else:
        verdict, code = "everything works: context parallelism is exact on this machine", 0
    console.print(f"{verdict} ({time.perf_counter() - started:.0f} s)", soft_wrap=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
