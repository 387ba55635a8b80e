"""Draw pictures or clips from prompts while a pretrained transformer is fine-tuned."""

from __future__ import annotations

import inspect
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.data.random_state import get_random_state, set_random_state
from lightning_cp.files import writing_new
from lightning_cp.finetune.card import CARD
from lightning_cp.finetune.encoders import pipeline_class
from lightning_cp.finetune.latent_cache import LatentCache
from lightning_cp.finetune.media.images import open_image
from lightning_cp.finetune.prompt_list import sample_prompts_of
from lightning_cp.finetune.prompt_samples import PromptSampler
from lightning_cp.recipes.sampling.album import Album
from lightning_cp.recipes.settings.components import components_of
from lightning_cp.recipes.training.run import Run
from lightning_cp.sampling.draw import gather_samples
from lightning_cp.training.modes import evaluating
from lightning_cp.training.ranks import TrainerRanks, log_picture


class PromptPictures:
    """Draw the prompts of the settings with the EMA weights. Training is not affected: see `make`.

    Args: config: resolved configuration of a fine-tuning run; `sampling.every` must be set.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._sampler: PromptSampler | None = None

    def after_step(self, run: Run) -> None:
        """Draw after every `sampling.every` steps but the last, and before the first step with `sampling.at_start`.

        The pipeline is loaded at the first call for a step. Call it on every rank.
        """
        step = run.state.step
        if step == 0 and not self._config.sampling.at_start:
            return
        if self._sampler is None:
            self._prepare(run)
        if step % self._config.sampling.every == 0 and step < self._config.max_steps:
            self.make(run, f"step_{step:08d}")

    def make(self, run: Run, name: str) -> None:
        """Write the samples to `samples/<name>/`, and all of them to `samples/<name>.png`. Call it on every rank.

        Weights, modes and random states are the same afterwards.
        """
        if self._sampler is None:  # the run was resumed at its last step, so `after_step` was never called
            self._prepare(run)
        assert self._sampler is not None, "it has just been made"
        module: Any = run.state.module
        before = get_random_state()
        try:
            with run.state.average.swapped_in(module), evaluating(module), _precision(run):
                share = self._sampler.draw()
        finally:
            set_random_state(before)
        samples = gather_samples(run.ranks, share, run.data_shard)[: len(self._sampler)]
        self._write(run, name, [x.cpu() for x in samples])

    def add_to_card(self, run: Run, folder: Path) -> None:
        """Copy the last pictures into the folder of the trained weights, and show them in the model card there."""
        with writing_new(folder / "samples.png") as path:
            shutil.copyfile(run.folder / "samples" / "final.png", path)
        prompts = [
            f"{number}. {prompt.text}"
            for number, prompt in enumerate(sample_prompts_of(_plain(self._config.sampling.prompts)), 1)
        ]
        settings = f"{self._config.sampling.num_inference_steps} steps, seed {self._config.seed}"
        add_section(folder / CARD, "Samples", ["![Samples](samples.png)", "", f"With {settings}:", "", *prompts])

    def _prepare(self, run: Run) -> None:
        config, call_settings = self._config, OmegaConf.to_container(self._config.sampling.call)
        assert isinstance(call_settings, dict), "checked before the start"
        call = {**_usual_size(run, config), "num_inference_steps": config.sampling.num_inference_steps, **call_settings}
        self._sampler = PromptSampler(
            config.model.pretrained,
            _plain(config.sampling.prompts),
            component=components_of(config)[0],
            seed=config.seed,
            **{str(key): value for key, value in call.items()},
        )
        before = get_random_state()
        self._sampler.prepare(run.state.module, run.ranks, run.data_shard)
        set_random_state(before)

    def _write(self, run: Run, name: str, samples: Sequence[Tensor]) -> None:
        """Write the files on the first rank, and log one picture of all samples. Call it on every rank."""
        album = Album(run.folder / "samples" / name, fps=self._config.sampling.fps)
        for number, sample in enumerate(samples if run.is_first else ()):  # [c, h, w] or [c, f, h, w]
            album.add(number, sample.movedim(0, -1))
        sheet = run.folder / "samples" / f"{name}.png"
        album.draw_sheet(sheet)
        logger = getattr(run, "logger", None)  # on the first rank only
        if logger is not None:
            with open_image(sheet) as picture:
                log_picture(logger, "samples", np.asarray(picture), run.state.step)


def add_section(card: Path, title: str, lines: Sequence[str]) -> None:
    """Add a section at the end of a card in Markdown. Raises: OSError: the card is then unchanged."""
    text = card.read_text(encoding="utf-8")
    with atomic_file(card) as scratch:
        scratch.write_text("\n".join([text, f"## {title}", "", *lines]) + "\n", encoding="utf-8")


def _plain(prompts: Any) -> Any:
    return OmegaConf.to_container(prompts) if OmegaConf.is_list(prompts) else prompts


def _usual_size(run: Run, config: DictConfig) -> dict[str, int]:
    """Return the most frequent size of the data, as arguments of the pipeline's call.

    Arguments that it does not take are left out: some pipelines choose height and width by a picture.
    """
    folder = config.data.path if config.data.kind == "latents" else run.folder / "latents"
    sizes = Counter((row.frames, row.height, row.width) for row in LatentCache(folder).rows)
    (frames, height, width), _ = sizes.most_common(1)[0]
    size = {"height": height, "width": width, **({} if frames == 1 else {"num_frames": frames})}
    taken = inspect.signature(pipeline_class(config.model.pretrained).__call__).parameters
    return {name: value for name, value in size.items() if name in taken}


def _precision(run: Run) -> AbstractContextManager[Any]:
    """Return the context in which Fabric or the Trainer runs a forward."""
    ranks: Any = run.ranks
    is_trainer = isinstance(ranks, TrainerRanks)
    precision = ranks.trainer.precision_plugin if is_trainer else ranks.strategy.precision
    context: AbstractContextManager[Any] = precision.forward_context()
    return context
