"""A recipe with ranks that train nothing: they check their environment, write metrics, and fail as `fault` says.

python tests/e2e/training/sweeping.py -m strategy=cp ring=1,2 +fault=none,raise_0
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from lightning_cp.recipes.runs.command import reads_settings
from lightning_cp.recipes.runs.recipe import run_recipe

HANG_S = 600.0
CONF = str(Path(__file__).parents[3] / "conf")


@reads_settings
def train(config: Any) -> None:
    """Run on every rank."""
    of_slurm = "RANK" not in os.environ
    rank = int(os.environ["SLURM_PROCID" if of_slurm else "RANK"])
    world = int(os.environ["SLURM_NTASKS" if of_slurm else "WORLD_SIZE"])
    assert world == config.ring * config.ulysses * config.data_parallel
    assert "LEFT_BEHIND" not in os.environ
    os.environ["LEFT_BEHIND"] = "by a job"
    run = Path(config.run_dir)
    if rank == 0:
        with (run / "metrics.csv").open("w") as file:
            # with validated=true, the lowest val_loss is in the middle, and the lower the loss, the higher it is
            validated = OmegaConf.select(config, "validated", default=False)
            file.write(f"step,loss,lr,grad_norm,step_time_s,tokens_per_s{',val_loss' if validated else ''}\n")
            for step in range(1, 4):
                val_loss = f",{5 - config.optim.lr + abs(step - 2)}" if validated else ""
                file.write(f"{step},{config.optim.lr + 1 / step},0.1,1.0,0.1,{100 * world}{val_loss}\n")
    fault = OmegaConf.select(config, "fault", default="none")
    if fault == f"raise_{rank}":
        raise ZeroDivisionError(f"rank {rank} fails")
    if fault == f"kill_{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang" or (fault != "none" and not fault.endswith(str(rank))):
        time.sleep(HANG_S)


@hydra.main(version_base="1.3", config_path=CONF, config_name="train")
def main(config: DictConfig) -> float | None:
    return run_recipe(config, train)


if __name__ == "__main__":
    main()
