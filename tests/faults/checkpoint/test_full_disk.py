"""A disk that fills up while a checkpoint is written: one OSError, the older checkpoint, and nothing else stays."""

from __future__ import annotations

import re
import resource
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_cp.checkpoint import latest_checkpoint
from lightning_cp.checkpoint.folder import atomic_file, atomic_folder
from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint
from lightning_cp.errors import CacheError
from lightning_cp.launch.rank import was_raised_for_the_user
from lightning_cp.recipes.sampling.album import Album
from lightning_cp.recipes.training.loop import StepReport
from lightning_cp.recipes.training.records import MetricsFile
from lightning_cp.sampling.tiles import write_png
from tests.faults.writers import WRITERS, prepare
from tests.harness import warm


def checkpoint(step: int, rows: int) -> Checkpoint:
    return Checkpoint(step, {"model": {"weight": torch.ones(rows, 1024)}, "average": {"weight": torch.ones(8)}}, {})


def saves_until_full(parent: Path) -> None:
    """Saves a small checkpoint, and then one that does not fit."""
    warnings.simplefilter("ignore")
    kept = save_checkpoint(parent, checkpoint(1, 8))
    with pytest.raises(OSError, match=r"written|too large|No space"):
        save_checkpoint(parent, checkpoint(2, 4096))
    assert [path.name for path in parent.iterdir()] == [kept.name]
    assert latest_checkpoint(parent.parent) == kept
    save_checkpoint(parent, checkpoint(3, 8), keep=1)
    assert [path.name for path in parent.iterdir()] == ["step_00000003"]


_LIMITED = (
    "import resource, sys; from pathlib import Path\n"
    "from tests.faults.checkpoint.test_full_disk import saves_until_full\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); saves_until_full(Path(sys.argv[1]))"
)


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LIMITED, str(tmp_path / "checkpoints")]
    ended = warm.run(command, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]


def _fills(name: str, folder: Path) -> None:
    """Write more than 1 MiB as each part of a run does."""
    noise = torch.randint(0, 256, (1024, 1024, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if name == "metrics.csv":
        with MetricsFile(folder / name) as metrics:
            for step in range(60_000):
                metrics.watch(StepReport(step, 0.25, 1e-3, 1.0, 0.1, 64.0))
    elif name == "sheet.png":
        write_png(noise, folder / name)
    elif name == "0000":
        Album(folder).add(0, noise)
    elif name == "card.md":
        with atomic_file(folder / name) as scratch:
            scratch.write_text("x" * (3 << 20))
    else:
        with atomic_folder(folder / name) as scratch:
            save_file({"x": noise}, scratch / "x.safetensors")


def each_small_write_names_its_path(folder: Path) -> None:
    for name, (file, write) in WRITERS.items():
        if name in ("manifest", "new file"):  # named by their callers
            continue
        (folder / name / file).parent.mkdir(parents=True)
        prepare(folder / name)
        path = re.escape(str(folder / name / file)).removesuffix(r"\.partial")
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
        try:
            with pytest.raises((OSError, CacheError), match=rf"^{path}\S* could not be written: .*too large"):
                write(folder / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def each_write_names_its_path(folder: Path) -> None:
    each_small_write_names_its_path(folder / "small")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    for name in ("metrics.csv", "sheet.png", "0000", "card.md", "export"):
        with pytest.raises(OSError, match=rf"{folder / name}\S* could not be written: .*too large") as error:
            _fills(name, folder)
        assert was_raised_for_the_user(error.value)
    with pytest.raises(OSError, match=rf"{folder}/\S*00000002\S* could not be written.*arlier checkpoints"):
        save_checkpoint(folder, checkpoint(2, 4096))


_EACH = (
    "import sys; from pathlib import Path\n"
    "from tests.faults.checkpoint.test_full_disk import each_write_names_its_path\n"
    "each_write_names_its_path(Path(sys.argv[1]))"
)


def test_each_write_names_its_path(tmp_path: Path) -> None:
    ended = warm.run([sys.executable, "-c", _EACH, str(tmp_path)], timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
