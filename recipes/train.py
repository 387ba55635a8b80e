"""Train a small diffusers transformer on real digits, sample from it, and show the result.

    lightning-cp train                       one process
    lightning-cp train strategy=cp ring=2    two ranks share the tokens of each sample

It needs no launcher, no download and no GPU: it starts the ranks itself. `--help` lists the settings.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_cp.recipes.runs.command import command, reads_settings
from lightning_cp.recipes.runs.recipe import run_recipe
from lightning_cp.recipes.settings.components import components_of
from lightning_cp.recipes.settings.finetune import is_finetuning
from lightning_cp.recipes.settings.trained import TrainedDenoiser
from lightning_cp.recipes.terminal import printable


@reads_settings
def train(config: DictConfig) -> None:
    """Build, train, sample and report on every rank. (The launching process needs none of these imports.)"""
    if is_finetuning(config):
        fine_tune(config)
        return
    from lightning_cp.export import save_pretrained
    from lightning_cp.recipes.digits.data import are_digits
    from lightning_cp.recipes.digits.denoisers import FluxDenoiser, WanDenoiser, save_conditioning
    from lightning_cp.recipes.sampling.show import SamplePictures
    from lightning_cp.recipes.training.fit import fit_model
    from lightning_cp.recipes.training.from_scratch import FromScratch
    from lightning_cp.recipes.training.records import draw_loss_curve
    from lightning_cp.recipes.training.run import Run
    from lightning_cp.sampling import SamplingSettings

    started = time.perf_counter()
    sampling, data = config.sampling, config.data
    settings = SamplingSettings(
        count=sampling.num_samples,
        num_steps=sampling.num_inference_steps,
        guidance=sampling.guidance_scale,
        seed=config.seed,
    )
    size = (data.channels, data.frames, data.height, data.width)
    pictures = SamplePictures(size, data.num_classes, settings, are_digits(data))

    def draw_sometimes(run: Run) -> None:
        step = run.state.step
        if sampling.every is not None and step % sampling.every == 0 and 0 < step < config.max_steps:
            pictures.make(run, f"step_{step:08d}")

    def finish(run: Run) -> None:
        recognised = pictures.make(run, "final")
        if config.export:
            denoiser: Any = run.state.module
            with run.state.average.swapped_in(denoiser):
                save_pretrained(denoiser.transformer, run.folder / "transformer")
                save_conditioning(denoiser, run.folder, writes=run.is_first)
            if run.is_first and type(denoiser) in (WanDenoiser, FluxDenoiser):
                trained = TrainedDenoiser(
                    denoiser=type(denoiser).__name__,
                    num_classes=denoiser.num_classes,
                    num_tokens=denoiser.class_tokens.num_tokens,
                    patch_size=getattr(denoiser, "patch_size", None),
                    size=size,
                    is_digits=are_digits(data),
                    num_samples=settings.count,
                    num_inference_steps=settings.num_steps,
                    guidance_scale=settings.guidance,
                )
                trained.write(run.folder)
        if run.is_first:
            draw_loss_curve(run.folder / "metrics.csv", run.folder / "loss.png")
            summarise_training(config, run, recognised=recognised, seconds=time.perf_counter() - started)

    fit_model(config, FromScratch.of, after_step=draw_sometimes, at_end=finish)


def fine_tune(config: DictConfig) -> None:
    """Fine-tune a pretrained transformer on every rank."""
    from lightning_cp.export import on_rank_zero
    from lightning_cp.recipes.sampling.prompts import PromptPictures
    from lightning_cp.recipes.training.finetune import FineTune
    from lightning_cp.recipes.training.fit import fit_model
    from lightning_cp.recipes.training.records import draw_loss_curve
    from lightning_cp.recipes.training.run import Run

    started = time.perf_counter()
    pictures = PromptPictures(config) if config.sampling.every is not None else None

    def draw_sometimes(run: Run) -> None:
        if pictures is not None:
            pictures.after_step(run)

    def finish(run: Run) -> None:
        trained = components_of(config)[0] if config.lora is None else "lora"
        if pictures is not None:
            pictures.make(run, "final")
            on_rank_zero(partial(pictures.add_to_card, run, run.folder / trained))
        if run.is_first:
            draw_loss_curve(run.folder / "metrics.csv", run.folder / "loss.png")
            summarise_training(config, run, seconds=time.perf_counter() - started)

    fit_model(config, FineTune.of, after_step=draw_sometimes, at_end=finish)


_RESULTS = ("lora", "transformer", "transformer_2", "controlnet", "best", "saved", "samples")  # folders of results


def summarise_training(config: DictConfig, run: Any, *, seconds: float, recognised: float | None = None) -> None:
    """Print in a few lines what was done and where the files are."""
    from lightning_cp.checkpoint import parse_manifest

    state = run.state
    done = 0 if config.resume is None else parse_manifest(Path(config.resume)).step
    resumed = f" ({done + 1} to {state.step})" if done else ""
    ranks = config.data_parallel * config.ring * config.ulysses
    spread = f"data {config.data_parallel} × ring {config.ring} × ulysses {config.ulysses}"
    where = f"{ranks} {config.accelerator} rank(s) = {spread}"
    print(f"Trained {state.step - done} steps{resumed} in {seconds:.0f} s on {where}.")
    if state.skipped:
        print(f"{state.skipped} of these steps were skipped, because their loss or gradient was not finite.")
    if recognised is not None:
        print(f"A classifier of the real digits recognises {recognised:.1%} of {config.sampling.num_samples} samples.")
    print(printable(run.folder))
    results = [f"{name}/" for name in _RESULTS if any(run.folder.glob(f"{name}/*"))]
    print("  " + "  ".join([*results, "loss.png", "metrics.csv", "checkpoints/", ".hydra/"]), flush=True)


@command("train")
def main(config: DictConfig) -> float | None:
    """Check the settings and start the ranks. Returns: in a sweep the objective, the mean of the last losses."""
    return run_recipe(config, train)


if __name__ == "__main__":
    main()
