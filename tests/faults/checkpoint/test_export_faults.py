"""A full disk and a kill while a LoRA is exported: one error on every rank, and files that are complete."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_cp.checkpoint import folder as folders
from lightning_cp.errors import ExportError
from lightning_cp.export import LORA_FILE
from lightning_cp.finetune import FineTuning, LoraSettings, add_lora
from lightning_cp.finetune.adapters.comfyui import COMFYUI_FILE
from lightning_cp.objectives import FlowMatching
from lightning_cp.recipes.sampling.prompts import add_section
from tests.harness import RankPool, warm
from tests.models import TINY

FILES = {LORA_FILE, COMFYUI_FILE}


def tuned(value: float) -> FineTuning:
    """A Flux transformer with a LoRA; all of its matrices have one value."""
    model = TINY["flux"].build().float()
    add_lora(model, LoraSettings(rank=2, targets="transformer_blocks.*to_q"))
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.constant_(p, value)
    family: Any = None  # not used by an export
    return FineTuning(model, family, objective=FlowMatching(seed=0))


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow above 256 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def values(folder: Path) -> dict[str, set[float]]:
    """Return the values of the matrices in each file of an export."""
    return {
        path.name: {float(x) for name, y in load_file(path).items() if "lora_" in name for x in y.flatten()}
        for path in folder.iterdir()
    }


def _fills(rank: int, world: int, folder: Path) -> str:
    tuned(1.0).export(folder)
    with full_disk(), pytest.raises(ExportError) as caught:
        tuned(2.0).export(folder)
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 3])
def test_a_full_disk_is_one_error_on_every_rank(world: int, tmp_path: Path, run_ranks: RankPool) -> None:
    messages = run_ranks(world, _fills, tmp_path)
    assert len(set(messages)) == 1
    assert "the export could not be written: " in messages[0]
    assert "too large" in messages[0]
    assert values(tmp_path / "lora") == {LORA_FILE: {1.0}}  # without ComfyUI's file, which would not fit a newer LoRA
    assert [path.name for path in tmp_path.iterdir()] == ["lora"]


def test_a_full_disk_leaves_the_model_card_as_it_was(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# LoRA\n")
    with full_disk(), pytest.raises(OSError, match="too large"):
        add_section(card, "Samples", ["x" * 1000])
    assert card.read_text() == "# LoRA\n"
    assert list(tmp_path.iterdir()) == [card]


def test_both_files_follow_the_umask(tmp_path: Path) -> None:
    tuned(1.0).export(tmp_path)
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in (*(tmp_path / "lora").iterdir(), tmp_path / "plain")}
    assert len(modes) == 1


def export_and_end(folder: Path, at: int) -> None:
    """Export over an older LoRA, and end this process like a kill at the flush number `at`."""
    flush, calls = folders.flush, []

    def end_at(path: Path) -> None:
        calls.append(path)
        if len(calls) == at:
            import os

            os._exit(9)
        flush(path)

    module = tuned(2.0)
    folders.flush = end_at
    module.export(folder)


_KILLED = (
    "import sys; from pathlib import Path; from tests.faults.checkpoint.test_export_faults import export_and_end\n"
)


@pytest.mark.full
def test_a_killed_export_leaves_complete_files_that_fit(tmp_path: Path) -> None:
    found, at = [], 0
    while not found or found[-1] != 0:
        at += 1
        folder = tmp_path / str(at)
        tuned(1.0).export(folder)
        code = f"{_KILLED}export_and_end(Path(sys.argv[1]), {at})"
        ended = warm.run([sys.executable, "-c", code, str(folder)], timeout=120)
        found.append(ended.returncode)
        written = values(folder / "lora")
        assert LORA_FILE in written
        assert written.keys() <= FILES | {f"{COMFYUI_FILE}.partial"}
        assert all(written[name] in ({1.0}, {2.0}) for name in written.keys() & FILES)
        if COMFYUI_FILE in written:
            assert written[COMFYUI_FILE] == written[LORA_FILE]
        tuned(3.0).export(folder)  # the next export removes what was left
        assert values(folder / "lora") == {LORA_FILE: {3.0}, COMFYUI_FILE: {3.0}}
        assert [path.name for path in folder.iterdir()] == ["lora"]
    assert len(found) > 4
    assert set(found[:-1]) == {9}
