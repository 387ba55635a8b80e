"""Names with markup, emoji codes, control characters or undecodable bytes are printed, and change nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cp.finetune import latent_cache
from lightning_cp.media import Skipped
from lightning_cp.precompute import Precomputed
from lightning_cp.recipes.precompute import report_precomputed
from lightning_cp.recipes.terminal import console, print_error, printable, rich_text

NAME = "[/red] [bold]a:cat:\x1b[2J\x9b\u202e\udcff\n.png"
SHOWN = r"[/red] [bold]a:cat:\x1b[2J\x9b\u202e\udcff\n.png"


def test_texts_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(rich_text(NAME), highlight=False, soft_wrap=True)
    assert capsys.readouterr().out == f"{SHOWN}\n"
    print_error(f"{NAME}\tx")
    assert capsys.readouterr().err == f"error: {SHOWN.replace(chr(92) + 'n', chr(10))}\tx\n"
    assert printable("é 猫 ✓") == "é 猫 ✓"


def test_characters_that_the_terminal_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding="ascii"))
    assert printable("猫") == r"\u732b"


def test_precompute_reports_any_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Cache(list[Any]):
        rows = ()

    monkeypatch.setattr(latent_cache, "LatentCache", lambda _: Cache())
    skipped = (Skipped(Path(NAME), f"{NAME}: no caption"),) * 11
    report_precomputed(Precomputed(11, 0, 0, 1, skipped), Path(f"/tmp/{NAME}"))
    shown = capsys.readouterr().out
    assert shown.startswith(f"/tmp/{SHOWN}: 0 samples")
    assert shown.count(f"skipped: {SHOWN}: no caption\n") == 10
    assert f"1 more, see /tmp/{SHOWN}/skipped.jsonl" in shown
