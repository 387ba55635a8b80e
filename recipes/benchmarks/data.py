"""Measure loading from a latent cache, and precompute: one process, one device."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from lightning_cp.checkpoint.folder import temporary_folder
from lightning_cp.data import bucket_loader
from lightning_cp.finetune.encoders import components_on
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.latent_cache import CacheWriter, LatentCache, LatentData
from lightning_cp.finetune.media import find_sources
from lightning_cp.finetune.objectives import objective_for
from lightning_cp.finetune.precompute import Loader, encode_captions, encode_sources
from lightning_cp.recipes.benchmarks.data_made import (
    captions,
    make_cache,
    make_pipeline,
    media_size,
    new_writer,
    write_media,
)
from lightning_cp.recipes.benchmarks.ranks import check_device, device_of, rows_on_ranks
from lightning_cp.recipes.benchmarks.report import MS, SPREAD, Column, Row, publish, show, times_of
from lightning_cp.recipes.runs.ranks import on_ranks
from lightning_cp.undoable import intercept_method

_WARM_UPS = 2
_COLUMNS = (
    *(MS, Column("median", "median_s", 1e3, ".1f"), SPREAD),
    Column("samples/s", "samples_per_s"),
    Column("waiting", "waited", 100, ".1f", " %"),
)
_ABOUT = """
Measured in one process. *Training steps* read batches from a latent cache; *waiting* is the median time until the next
batch is there, as a share of the median step. *Precompute* reads, decodes, crops and encodes files, and writes the
cache; *waiting* is the share of the time in which the VAE waits for files. *ms* is a step, or a pass over all files or
captions. The encoders have random weights and are small: real ones take longer per sample, and wait less.
"""

Repetition = tuple[float, float | None]  # seconds, and how many of them were spent waiting for data


def check_settings(config: DictConfig) -> str:
    """Check the settings. Returns: what is wrong; "" if nothing is."""
    return check_device(config, 1)


def run(config: DictConfig, folder: Path) -> None:
    """Measure, and show the results."""
    rows = rows_on_ranks(measure, config, 1, folder)
    show(rows, _COLUMNS)
    publish(rows, _COLUMNS, folder, config.page, about=_ABOUT)


@on_ranks
def measure(config: DictConfig) -> Iterator[Row]:
    """Measure in this process, which on CPU has one thread."""
    yield from measure_data(config, device_of(config))


def measure_data(config: DictConfig, device: torch.device) -> list[Row]:
    """Measure training steps from a latent cache, then precompute. Returns: a row for each subject.

    Subjects run one after the other, not in turn: workers would load during the steps of another subject.
    """
    torch.manual_seed(0)
    transformer: nn.Module = instantiate(config.model, _convert_="all").to(getattr(torch, config.dtype))
    pipe, family = make_pipeline(config, transformer)
    with temporary_folder() as folder:
        cache = make_cache(folder / "cache", config, family)
        subjects: dict[str, tuple[int, Callable[[], Generator[Repetition, None, None]]]] = {}
        for workers in config.data.num_workers:
            name = f"training steps, {workers} worker{'' if workers == 1 else 's'}"
            subjects[name] = config.data.batch, functools.partial(_steps, config, device, cache, transformer, workers)
        for kind in ("pictures", "clips"):
            media = functools.partial(_media, config, device, pipe, family, folder / kind, kind)
            subjects[f"precompute, {kind}"] = config.data.files, media
        text = functools.partial(_captions, config, device, pipe, family)
        subjects["precompute, captions"] = config.data.captions, text
        about = {"workload": "data", "tokens": config.tokens, "ranks": 1}
        return [
            {**about, "subject": name, **_measured(count, start, config)} for name, (count, start) in subjects.items()
        ]


def _measured(samples: int, start: Callable[[], Generator[Repetition, None, None]], config: DictConfig) -> Row:
    """Repeat a subject, at least `repeats` times and for `seconds`. Returns: figures of a row."""
    times_s, waited_s = list[float](), list[float]()
    try:
        with closing(start()) as repetitions:
            for _ in range(_WARM_UPS):
                next(repetitions)
            started = time.perf_counter()
            while len(times_s) < config.repeats or time.perf_counter() - started < config.seconds:
                elapsed, waited = next(repetitions)
                times_s.append(elapsed)
                if waited is not None:
                    waited_s.append(waited)
    except (ImportError, ValueError, OSError) as error:  # a package that is missing, or a codec
        lines = str(error).strip().splitlines()
        return {"refused": f"{type(error).__name__}: {lines[0] if lines else ''}"}
    return data_figures(samples, times_s, waited_s)


def data_figures(samples: int, times_s: Sequence[float], waited_s: Sequence[float]) -> Row:
    """Return figures of a row: waiting is a ratio of medians, and samples are counted at the median.

    Args: waited_s: seconds of each repetition spent waiting for data; empty if the subject reads no data.
    """
    figures = times_of(times_s)
    waiting = {"waited": statistics.median(waited_s) / figures["median_s"]} if waited_s else {}
    return {**figures, "samples_per_s": samples / figures["median_s"], **waiting}


def _steps(
    config: DictConfig, device: torch.device, cache: LatentCache, transformer: nn.Module, workers: int
) -> Generator[Repetition, None, None]:
    """Train: wait for a batch, forward, backward, SGD. A step ends when the device has finished.

    With 0 workers on a GPU, all loading counts as waiting, although a part would overlap with the previous step.
    """
    model, family = transformer.to(device).train(), cache.family()
    objective = objective_for(family, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    pin = device.type == "cuda"
    loader = bucket_loader(
        LatentData(cache), batch_size=config.data.batch, num_workers=workers, with_epoch=True, pin_memory=pin
    )
    batches, step = iter(loader), 0
    while True:
        started = time.perf_counter()
        batch = next(batches)
        arrived = time.perf_counter()
        loss = objective.loss(model, family, batch.to(device, non_blocking=pin), step=step, first_index=0)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield time.perf_counter() - started, arrived - started
        step += 1


def _media(
    config: DictConfig, device: torch.device, pipe: Any, family: Family, folder: Path, kind: str
) -> Generator[Repetition, None, None]:
    """Encode the same files again and again, each time into a new cache: read, decode, crop, encode, write."""
    size = media_size(config)
    size = type(size)(1 if kind == "pictures" else size.frames, size.height, size.width)
    write_media(folder / "files", kind, config.data.files, size)
    sources = find_sources(folder / "files").sources
    clock = _Clock()
    undo = intercept_method(family, "encode_media", clock.around)
    try:
        with components_on(pipe, family.components.media, device):
            while True:
                with _new_writer(family) as writer:
                    loader = Loader({None: [size]}, writer)
                    clock.start()
                    _, skipped = encode_sources(
                        pipe,
                        family,
                        sources,
                        writer,
                        loader=loader,
                        workers=config.data.readers,
                        report=clock.finished,
                    )
                    elapsed = clock.elapsed_s
                if skipped:
                    raise ValueError(skipped[0].reason)
                yield elapsed, clock.waited_s
    finally:
        undo()


def _captions(config: DictConfig, device: torch.device, pipe: Any, family: Family) -> Generator[Repetition, None, None]:
    """Encode the same captions again and again, each time into a new cache."""
    texts = captions(config.data.captions, config.inputs.encoder_hidden_states[1])
    with components_on(pipe, family.components.text, device):
        while True:
            with _new_writer(family) as writer:
                started = time.perf_counter()
                encode_captions(pipe, family, texts, writer, batch_size=config.data.text_batch)
                elapsed = time.perf_counter() - started
            yield elapsed, None


@contextmanager
def _new_writer(family: Family) -> Generator[CacheWriter, None, None]:
    """Open a writer of a new cache, which is deleted afterwards."""
    with temporary_folder() as scratch:
        yield new_writer(scratch / "cache", family)


class _Clock:
    """Time that `encode_sources` waits for files: from the end of one sample to the next call of the encoder."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._started = self._last = time.perf_counter()
        self.waited_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.waited_s += time.perf_counter() - self._last
        return call(*args, **kwargs)

    def finished(self, count: int) -> None:
        """Note that a sample was encoded and written: the `report` of `encode_sources`."""
        self._last = time.perf_counter()
