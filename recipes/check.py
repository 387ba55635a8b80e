"""Check a plan: run a model alone and context-parallel in every mode, and print which outputs and gradients differ.

    lightning-cp check model=my_model.py plan=my_model.py

docs/plans.md explains the steps. `--help` lists the settings. Exit code 1 if something differs.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from lightning_cp.launch.rank import load_target
from lightning_cp.recipes import terminal
from lightning_cp.recipes.runs.command import command
from lightning_cp.recipes.runs.ranks import modes, on_ranks, run_on_ranks
from lightning_cp.recipes.terminal import print_error, rich_text


@on_ranks
def check_modes(config: DictConfig) -> Iterator[dict[str, Any]]:
    """Check every mode on every rank, one row each."""
    from torch.distributed import get_world_size

    from lightning_cp.engine import check_plan

    module, inputs = _load(config.model, "model")(), _load(config.model, "inputs")()
    plan = None if config.plan is None else _load(config.plan, "plan")
    for name, chosen in modes(get_world_size()).items():
        result = check_plan(module, inputs, chosen, plan, tolerance=config.tolerance)
        yield {
            "mode": name,
            "model": type(module).__name__,
            "output": result.output_error,
            "gradient": result.gradient_error,
            "passed": result.passed,
            "text": str(result),
        }


def _load(location: str, name: str) -> Any:
    return load_target(f"{location}:{name}")


def _find_problem(config: DictConfig) -> str | None:
    """Describe what is wrong with the settings; None if nothing is."""
    for key in ("model", "plan"):
        location = config[key]
        if location is None:
            continue
        if str(location).endswith(".py"):
            if not Path(location).is_file():
                return f"{key}={location} does not exist: must be a .py file or a module"
        else:
            try:
                importlib.import_module(str(location))
            except ImportError as error:
                return f"{key}={location} must be a .py file or a module that can be imported ({error})"
    if not isinstance(config.ranks, int) or config.ranks < 2:
        return f"ranks={config.ranks} must be an integer of at least 2"
    return None


def run(config: DictConfig) -> int:
    """Run all modes on ranks of this machine and show the results. Returns: the exit code."""
    problem = (
        "model=<file.py> must be set, see --help" if OmegaConf.is_missing(config, "model") else _find_problem(config)
    )
    if problem is not None:
        print_error(problem)
        return 2
    absolute = {key: str(Path(config[key]).resolve()) for key in ("model", "plan") if str(config[key]).endswith(".py")}
    rows, result = run_on_ranks(check_modes, {**config, **absolute}, config.ranks, limit_s=config.limit_s)
    if rows:
        _show(rows, config)
    if result.failure is not None:
        print_error(result.failure.describe())
        return result.exit_code
    return 0 if all(row["passed"] for row in rows) else 1


def _show(rows: list[dict[str, Any]], config: DictConfig) -> None:
    console = terminal.console()
    table = Table(title=f"{rich_text(rows[0]['model'])} on {config.ranks} ranks", title_justify="left")
    table.add_column("mode")
    for name in ("output", "gradient"):
        table.add_column(name, justify="right")
    for row in rows:
        colour = "" if row["passed"] else "[red]"
        table.add_row(row["mode"], f"{colour}{row['output']:.0e}", f"{colour}{row['gradient']:.0e}")
    console.print(table)
    for row in rows:
        if not row["passed"]:
            console.print(f"[red]{row['mode']}[/]: {rich_text(row['text'])}")
    passed = all(row["passed"] for row in rows)
    console.print("exact in every mode" if passed else f"differs by more than {config.tolerance:.0e}, see above")


@command("check", "check")
def main(config: DictConfig) -> None:
    """Check the settings, run all modes, and exit with 1 if something differs."""
    code = run(config)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
