"""Plan the degrees of parallelism: which layouts of the ranks fit, how long a step takes, and what bounds it.

    lightning-cp plan model=flux_dev ranks=8 gpu=h100

Runs our own engine on tensors without storage, in one process without a GPU. Writes plan.json and plan.png to the run
directory. docs/planning.md explains the table, and `--help` lists the settings. Exit code 1 if nothing fits.
"""

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_cp.app import terminal
from lightning_cp.app.planning.settings import request_of, scaling_of
from lightning_cp.app.runs.command import command
from lightning_cp.app.terminal import print_error, printable, rich_text
from lightning_cp.compat.packages import missing_package

if TYPE_CHECKING:
    from lightning_cp.planning.devices import Device
    from lightning_cp.planning.request import Request


def run(config: DictConfig, folder: Path) -> int:
    """Plan, print the result and write its files. Returns: the exit code."""
    from lightning_cp.app.planning.measure import StoppedError, check_measure, measured
    from lightning_cp.app.planning.report import draw, notes, table, write_json
    from lightning_cp.planning.search import plan

    warnings.filterwarnings("ignore")  # from other packages
    console = terminal.console(width=150)
    try:
        several = scaling_of(config)
        if several is not None:
            return _scale(*several, folder)
        request = request_of(config)
        check_measure(config.measure, request)
        found = plan(request)
        if config.measure and found.choices:
            found = measured(found, config.measure, config, folder, lambda line: console.print(rich_text(line)))
    except (ValueError, ImportError) as error:
        print_error(missing_package(error, "lightning-cp plan") or " ".join(str(error).split()))
        return 2
    except StoppedError as error:
        print_error(str(error))
        return error.exit_code
    if found.choices:
        console.print(table(found, config.rows))
    for line in notes(found):
        console.print(rich_text(line))
    try:
        write_json(found, folder / "plan.json")
        if found.best is not None:
            draw(found, folder / "plan.png", config.rows)
    except OSError as error:
        print_error(str(error))
        return 1
    if found.best is None:
        print_error(found.reason)
        return 1
    console.print(rich_text(found.reason))
    print(" ".join(found.request.overrides(found.best.layout)))
    print(printable(f"{folder / 'plan.json'}, plan.png"))
    return 0


def _scale(request: "Request", devices: "list[Device]", ranks: list[int], folder: Path) -> int:
    """Plan several numbers of ranks and devices, print the table and write its files. Returns: the exit code."""
    from lightning_cp.app.planning.scaling import scale, table, write

    found = scale(request, devices, ranks)
    console = terminal.console(width=150)
    console.print(table(found))
    for one in found:
        for line in one.limits():
            console.print(rich_text(f"{one.device.name}: {line}"))
    try:
        write(found, folder)
    except OSError as error:
        print_error(str(error))
        return 1
    print(printable(f"{folder / 'scaling.json'}, scaling.md, scaling.png"))
    return 0 if any(x.fitting for x in found) else 1


@command("plan", "plan")
def main(config: DictConfig) -> None:
    """Plan, and exit with the code of the result if it is not 0."""
    code = run(config, Path(HydraConfig.get().runtime.output_dir))
    if code:
        sys.exit(code)
