"""Plan the degrees of parallelism: which layouts of the ranks fit, how long a step takes, and what bounds it.

    lightning-cp plan model=flux_dev ranks=8 gpu=h100
    lightning-cp plan calibrate=true ranks=2

Runs our own engine on tensors without storage, in one process without a GPU. Writes plan.json to the run
directory. docs/planning.md explains the table, and `--help` lists the settings. Exit code 1 if nothing fits. With
`calibrate=true` it measures the rates of this machine instead, and writes them to device.yaml, for gpu=….
"""

import sys
import warnings
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_cp.compat.versions import missing_package
from lightning_cp.launch import Machine
from lightning_cp.recipes import terminal
from lightning_cp.recipes.planning.settings import request_of
from lightning_cp.recipes.runs.command import command
from lightning_cp.recipes.runs.sweep import in_sweep
from lightning_cp.recipes.settings.table import Setting, SettingsError
from lightning_cp.recipes.terminal import print_error, printable, rich_text
from lightning_cp.rules import Integer


def run(config: DictConfig, folder: Path) -> int:
    """Plan, print the result and write its files. Returns: the exit code."""
    from lightning_cp.planning.search import search
    from lightning_cp.recipes.planning.report import notes, table, write_json

    warnings.filterwarnings("ignore")  # from other packages
    console = terminal.console(width=150)
    try:
        found = search(request_of(config))
    except (ValueError, ImportError) as error:
        print_error(missing_package(error, "lightning-cp plan") or " ".join(str(error).split()))
        return 2
    if found.choices:
        console.print(table(found, config.rows))
    for line in notes(found):
        console.print(rich_text(line))
    try:
        write_json(found, folder / "plan.json", lora_rank=config.lora.rank)
    except OSError as error:
        print_error(str(error))
        return 2
    if found.best is None:
        print_error(found.reason)
        return 1
    console.print(rich_text(found.reason))
    print(" ".join(found.request.overrides(found.best.layout)))
    print(printable(folder / "plan.json"))
    return 0


def run_calibration(config: DictConfig, folder: Path) -> int:
    """Measure this machine's rates, on its GPUs unless gpu=cpu. Returns: the exit code."""
    from lightning_cp.recipes.planning.calibrate import calibrate

    name = config.gpu if isinstance(config.gpu, str) else config.gpu.name
    try:
        if name not in ("auto", "cpu"):
            raise SettingsError(f"gpu={name}: calibrate=true measures this machine; use gpu=auto or gpu=cpu")
        Setting("ranks", Integer(1)).check(config)
        result = calibrate(config.ranks, is_gpu=name == "auto" and Machine.this().gpus > 0, folder=folder)
    except SettingsError as error:
        print_error(error)
        return 2
    except RuntimeError as error:
        print_error(error)
        return 1
    print(result.read_text(encoding="utf-8"))
    print(printable(f"use it with: lightning-cp plan gpu={result} …"))
    return 0


@command("plan", "plan")
def main(config: DictConfig) -> None:
    """Plan, and exit with the code of the result if it is not 0; a multirun goes on where nothing fits."""
    action = run_calibration if config.calibrate is True else run
    code = action(config, Path(HydraConfig.get().runtime.output_dir))
    if code and not (code == 1 and in_sweep()):
        sys.exit(code)


if __name__ == "__main__":
    main()
