"""The certificate: what is compared, and what is written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_cp.app.card_sections import add_section
from lightning_cp.app.runs.certificate import Certificate, compare, write

CONFIG = OmegaConf.create({"data_parallel": 2, "ring": 3, "ulysses": 1, "precision": "32-true"})


def _metrics(path: Path, losses: list[float]) -> Path:
    rows = [f"{step},{loss}" for step, loss in enumerate(losses, 1)]
    path.write_text("\n".join(["step,loss", *rows]) + "\n")
    return path


def _compared(folder: Path, here: list[float], alone: list[float], precision: str = "32-true") -> Certificate:
    config = OmegaConf.merge(CONFIG, {"precision": precision})
    return compare(config, _metrics(folder / "here.csv", here), _metrics(folder / "alone.csv", alone))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "precision", "holds"),
    [(1.00009, "32-true", True), (1.00011, "32-true", False), (1.01, "bf16-mixed", True), (1.03, "bf16-true", False)],
)
def test_the_limit_depends_on_the_precision(tmp_path: Path, loss: float, precision: str, holds: bool) -> None:
    certificate = _compared(tmp_path, [2.0, loss], [2.0, 1.0], precision)
    assert certificate.holds == holds
    assert ("NOT equal" in certificate.lines()[0]) != holds


def test_a_loss_that_is_not_finite_is_no_proof(tmp_path: Path) -> None:
    assert not _compared(tmp_path, [2.0, math.nan], [2.0, 1.0]).holds
    assert not _compared(tmp_path, [2.0, 1.0], [math.inf, 1.0]).holds


def test_only_the_first_twenty_steps_count(tmp_path: Path) -> None:
    certificate = _compared(tmp_path, [1.0] * 20 + [9.0], [1.0] * 20 + [1.0])
    assert certificate.steps == [*range(1, 21)]
    assert certificate.holds


def test_files_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    card = tmp_path / "lora" / "README.md"
    card.write_text("# LoRA\n\ntext\n")
    add_section(card, "Samples", ["a picture"])
    write(_compared(tmp_path, [2.0], [3.0]), tmp_path)
    certificate = _compared(tmp_path, [2.0], [2.0])
    write(certificate, tmp_path)
    values = json.loads((tmp_path / "certificate.json").read_text())
    assert values["holds"]
    assert values["topology"] == {"data": 2, "ring": 3, "ulysses": 1}
    text = card.read_text()
    assert text.startswith(
        "# LoRA\n\ntext\n\n## Samples\n\na picture\n\n## Certificate\n\nThe losses of the first 1 steps"
    )
    assert text.count("## Certificate") == 1
    assert "data 2 × ring 3 × ulysses 1 and on one process are equal" in text
