"""Files of recipes/plan.py that cannot be read or written are one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from omegaconf import OmegaConf

from lightning_cp.app.commands import plan as command
from lightning_cp.app.planning import report
from lightning_cp.app.planning.settings import device_of
from lightning_cp.app.settings.table import SettingsError
from lightning_cp.planning import search


@pytest.mark.parametrize("content", [b"\x00\x01garbage", b"a: [", b"\xff\xfe\xfa", b"[1, 2]"])
def test_a_file_that_is_no_device_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "device.yaml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=f"gpu={file} (cannot be read|must hold the figures)"):
        device_of(str(file))


@pytest.mark.parametrize("written", ["write_json", "draw"])
def test_a_full_disk_is_one_line_after_the_table(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: Any = mock.Mock()
    monkeypatch.setattr(search, "plan", lambda request: found)
    for name, value in (("request_of", mock.Mock()), ("scaling_of", None)):
        monkeypatch.setattr(command, name, lambda config, value=value: value)
    shown = {
        "table": lambda *_: "the table",
        "notes": lambda _: ["a note"],
        "write_json": mock.Mock(),
        "draw": mock.Mock(),
    }
    for name, function in shown.items():
        monkeypatch.setattr(report, name, function)
    monkeypatch.setattr(report, written, mock.Mock(side_effect=OSError("plan could not be written: No space left")))
    assert command.run(OmegaConf.create({"rows": 3, "measure": 0}), tmp_path) == 1
    printed = capsys.readouterr()
    assert "the table" in printed.out
    assert "error: plan could not be written: No space left" in printed.out + printed.err
