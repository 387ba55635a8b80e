"""Measure attention, a training step and sampling: in one process, in every mode of lightning_cp, and in diffusers'.

    lightning-cp bench
    lightning-cp bench bench=quick

`bench` chooses the settings, which name their program: modes, sparse masks, or one GPU. `--help` lists them. The
results are in the run directory. The programs are in `recipes/benchmarks`, which a wheel has not.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_cp.recipes.runs.command import command

PROGRAMS = ("modes", "sparse", "gpu.run")


@command("bench", "bench")
def run(config: DictConfig) -> None:
    """Check the settings and run their program."""
    if config.program not in PROGRAMS:
        sys.exit(f"error: program={config.program} is not valid: must be one of {', '.join(PROGRAMS)}")
    program = import_module(f"lightning_cp.recipes.benchmarks.{config.program}")
    problem = program.check_settings(config)
    if problem:
        sys.exit(f"error: {problem}")
    program.run(config, Path(HydraConfig.get().runtime.output_dir))


def main() -> None:
    """Run the program of the settings. Exits with 1 if the benchmarks are not installed."""
    if find_spec("lightning_cp.recipes.benchmarks") is None:
        sys.exit("error: the benchmarks are not installed: run recipes/bench.py in a clone of the repository")
    run()


if __name__ == "__main__":
    main()
