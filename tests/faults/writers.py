"""Everything that writes a file by name into an output folder, for the tests of planted links and full disks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from lightning_cp.checkpoint.folder import atomic_file, atomic_folder
from lightning_cp.checkpoint.manifest import MANIFEST, Manifest
from lightning_cp.files import new_file, writing_new
from lightning_cp.finetune.latent_cache.store import write_file, write_tensors
from lightning_cp.finetune.precompute.run import Precomputed, _complete
from lightning_cp.media import Skipped
from lightning_cp.recipes.benchmarks.gpu.page import write_page
from lightning_cp.recipes.benchmarks.gpu.results import Result, write_results
from lightning_cp.recipes.benchmarks.plots import draw_workload
from lightning_cp.recipes.benchmarks.report import write_csv
from lightning_cp.recipes.benchmarks.subject import SINGLE_RANK
from lightning_cp.recipes.digits.denoisers import CONDITIONING_FILE, save_conditioning
from lightning_cp.recipes.runs.outcome import Outcome, Status
from lightning_cp.recipes.runs.saved_settings import save_settings
from lightning_cp.recipes.runs.sweep import draw_sweep, summarise_sweep
from lightning_cp.recipes.sampling.media import write_sample
from lightning_cp.recipes.training.records import COLUMNS, MetricsFile, draw_loss_curve
from lightning_cp.sampling.tiles import write_png

TEXT = "new " * 20


def prepare(folder: Path) -> None:
    """Write what some writers read."""
    outcome(folder).write(folder)
    run = folder.parent / "inputs"
    run.mkdir(exist_ok=True)
    (run / "metrics.csv").write_text(
        "\n".join([",".join(COLUMNS), *(",".join("1" for _ in COLUMNS) for _ in range(3))])
    )


def outcome(folder: Path) -> Outcome:
    run = str(folder.parent / "inputs")
    return Outcome(0, ["token=x"], {}, Status.FINISHED, "", 0, 3, 0.1, 0.1, 0.1, 9.0, 2.0, 1.0, run)


def settings() -> Any:
    """Return a configuration and Hydra's own settings."""
    hydra = {"hydra": {"overrides": {"task": ["token=x"]}}}
    return OmegaConf.create({"token": "x", "here": "${token}"}), OmegaConf.create(hydra)


def write_atomically(path: Path) -> None:
    with atomic_file(path) as scratch:
        scratch.write_text(TEXT)


def _folder(path: Path) -> None:
    with atomic_folder(path.parent / "model") as scratch:
        (scratch / path.name).write_text(TEXT)


def _skips(folder: Path) -> None:
    result = Precomputed(2, 1, 0, 1, (Skipped(Path("a.png"), "is damaged"),))
    _complete(folder, SimpleNamespace(finish=list), [], result)  # type: ignore[arg-type]


def _written(path: Path) -> None:
    with writing_new(path):
        path.write_text(TEXT)


_ONES = {"x": torch.ones(2)}
_ROWS: Any = [{"workload": "a", "tokens": 1, "ranks": 1, "subject": SINGLE_RANK, "ratio": 1.0, "peak_bytes": 1}]
_SEEN = np.arange(48, dtype=np.uint8)
WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "atomic file": ("a.json.partial", lambda folder: write_atomically(folder / "a.json")),
    "its target": ("a.json", lambda folder: write_atomically(folder / "a.json")),
    "atomic folder": ("model.partial", lambda folder: _folder(folder / "a")),
    "index of a cache": ("index.json", lambda folder: write_file(folder, "index.json", TEXT.encode())),
    "sample of a cache": ("a/b.safetensors", lambda folder: write_tensors(folder, "a/b.safetensors", _ONES, {})),
    "skipped": ("skipped.jsonl", _skips),
    "sheet": ("a.png", lambda folder: write_png(torch.zeros(4, 4, 3, dtype=torch.uint8), folder / "a.png")),
    "picture": ("b.png", lambda folder: write_sample(_SEEN.reshape(4, 4, 3), folder / "b", format="png")),
    "clip": ("b.gif", lambda folder: write_sample(_SEEN[:24].reshape(2, 2, 2, 3), folder / "b", format="gif")),
    "sound": ("b.wav", lambda folder: write_sample(torch.zeros(1, 50), folder / "b", format="wav")),
    "metrics": ("metrics.csv", lambda folder: MetricsFile(folder / "metrics.csv").__exit__(None, None, None)),
    "loss curve": (
        "loss.png",
        lambda folder: draw_loss_curve(folder.parent / "inputs" / "metrics.csv", folder / "loss.png"),
    ),
    "outcome": (".outcomes/0.partial", lambda folder: outcome(folder).write(folder)),
    "sweep": ("sweep.csv", summarise_sweep),
    "curves of a sweep": ("sweep.png", lambda folder: draw_sweep([outcome(folder)], folder / "sweep.png")),
    "settings": (".hydra/config.yaml", lambda folder: save_settings(folder, *settings())),
    "manifest": (MANIFEST, lambda folder: Manifest(1, 1.0, {}, {"a": TEXT}).write(folder)),
    "conditioning": (CONDITIONING_FILE, lambda folder: save_conditioning(torch.nn.Linear(2, 2), folder, writes=True)),
    "table of a benchmark": ("bench.csv", lambda folder: write_csv(_ROWS, folder / "bench.csv")),
    "plot of a benchmark": ("bench.png", lambda folder: draw_workload(_ROWS, folder / "bench.png")),
    "results": ("r.json.partial", lambda folder: write_results({"a": {"b": Result()}}, folder / "r.json")),
    "page": ("gpu.md", lambda folder: write_page({}, [], folder, device="cpu")),
    "new file": ("x", lambda folder: new_file(folder / "x").write_text(TEXT)),
    "named file": ("x", lambda folder: _written(folder / "x")),
}
