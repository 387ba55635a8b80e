"""Trains a small diffusers transformer on real digits, samples from it, and shows what came of it.

    python recipes/train.py                       one process
    python recipes/train.py strategy=cp ring=2    two ranks share the tokens of each sample

It needs no launcher, no download and no GPU: it starts its own ranks. `--help` lists the settings.
"""

import os
import sys
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from lightning_cp.launch import conf_dir, quiet_overrides, run_recipe


def train(config: DictConfig) -> None:
    """What every rank does: build, train, sample, tell. (Imports are here: the process that starts it needs none.)"""
    from lightning_cp.sampling import SamplePictures, SamplingSettings
    from lightning_cp.training.assemble import build_run, fit_run
    from lightning_cp.training.records import draw_loss_curve

    started = time.perf_counter()
    run = build_run(config)
    chosen = config.sampling
    settings = SamplingSettings(chosen.count, chosen.num_steps, chosen.guidance, seed=config.seed)
    pictures = SamplePictures(run.sample_shape, config.data.num_classes, settings, run.folder.samples)

    def picture_on_the_way(step: int) -> None:
        if chosen.every is not None and step % chosen.every == 0 and step < config.max_steps:
            pictures.make(run.fabric, run.state, f"step_{step:08d}")

    fit_run(run, config, after_step=picture_on_the_way)
    recognised = pictures.make(run.fabric, run.state, "final")

    if run.is_first:
        draw_loss_curve(run.folder.metrics, run.folder.loss_curve)
        summarise(config, run.folder.path, recognised=recognised, seconds=time.perf_counter() - started)


def summarise(config: DictConfig, folder: Path, *, recognised: float, seconds: float) -> None:
    """Says in a few lines what was done and where things lie."""
    ranks = config.data_parallel * config.ring * config.ulysses
    spread = f"data {config.data_parallel} × ring {config.ring} × ulysses {config.ulysses}"
    print(f"Trained {config.max_steps} steps in {seconds:.0f} s on {ranks} {config.accelerator} rank(s) = {spread}.")
    print(f"A classifier of the real digits recognises {recognised:.1%} of {config.sampling.count} samples.")
    print(f"{folder}")
    print("  samples/final.png  loss.png  metrics.csv  checkpoints/  .hydra/", flush=True)


@hydra.main(version_base="1.3", config_path=conf_dir(__file__), config_name="train")
def main(config: DictConfig) -> float | None:
    """Checks the settings and starts the ranks. Returns, in a sweep, the objective: the mean of the last losses."""
    return run_recipe(config, target=f"{os.path.abspath(__file__)}:train")


if __name__ == "__main__":
    sys.argv += quiet_overrides(os.environ)
    main()
