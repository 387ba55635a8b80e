"""Files of recipes/plan.py that cannot be read or written are one error."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from omegaconf import OmegaConf

from lightning_cp.planning import search
from lightning_cp.planning.devices import DEVICES
from lightning_cp.recipes import plan as command
from lightning_cp.recipes.planning import report, settings
from lightning_cp.recipes.planning.settings import device_of
from lightning_cp.recipes.settings.table import SettingsError

_FIGURES = b"tflops: 1\nmemory_gb: 2\nmemory_gbs: 3\nlink_gbs: 4\nnetwork_gbs: 5\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\x01garbage", "cannot be read: it is not YAML. It must hold tflops, memory_gb"),
        (b"a: [", "cannot be read: it is not YAML"),
        (b"\xff\xfe\xfa", "cannot be read: it is not YAML"),
        (b"[1, 2]", "does not describe a device: it holds a list, not names with values"),
        (b"", "does not describe a device: it is empty"),
        (
            b"model: a\ndata: ${x}\n3: b\n",
            "no tflops, memory_gb, memory_gbs, link_gbs, network_gbs (it has model, data, 3)",
        ),
        (_FIGURES + b"tflop: 3\n", "does not describe a device: gpu.tflop is no figure of a device"),
        (_FIGURES.replace(b"tflops: 1", b"tflops: ${x}"), "gpu.tflops='${x}' must be a number more than 0"),
        (_FIGURES + b"capability: 9\n", "gpu.capability=9 must be two integers"),
    ],
)
def test_a_file_that_is_no_device_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "device.yaml"
    file.write_bytes(content)
    with pytest.raises(SettingsError) as error:
        device_of(str(file))
    assert str(error.value).startswith(f"gpu={file} ")
    assert message in str(error.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for name, reason in (("none", "No such file or directory"), ("folder", "Is a directory")):
        with pytest.raises(SettingsError, match=f"gpu={tmp_path / name}.yaml cannot be read: {reason}"):
            device_of(str(tmp_path / f"{name}.yaml"))


def test_a_file_of_before_is_not_calibrated(tmp_path: Path) -> None:
    """The file of a calibration that did not measure every rate."""
    figures = asdict(replace(DEVICES["cpu"], source="measured"))
    for missing in ("", "shards_share"):
        file = tmp_path / f"device{missing}.yaml"
        file.write_text(yaml.safe_dump({name: x for name, x in figures.items() if name != missing}))
        device = device_of(str(file))
        assert device.is_calibrated == (not missing)
    assert device.source == "measured, but without shards_share"


@pytest.mark.parametrize(("given", "memory_gb"), [("auto", 40), ({"name": "auto", "memory_gb": 30}, 30)])
def test_this_gpu_is_planned_with_its_own_memory(monkeypatch: pytest.MonkeyPatch, given: Any, memory_gb: float) -> None:
    small = mock.Mock(total_memory=40 * 10**9)
    small.name = "NVIDIA A100-PCIE-40GB"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: small)
    device = settings.device_of(OmegaConf.create(given) if isinstance(given, dict) else given)
    assert (device.tflops, device.memory_gb) == (312, memory_gb)


def test_an_older_plan_stays_if_writing_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{}")
    monkeypatch.setattr(report, "as_json", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.write_json(mock.Mock(), file, lora_rank=None)
    assert file.read_text() == "{}"
    assert list(tmp_path.iterdir()) == [file]


def test_a_pipeline_with_a_time_per_token_is_known_by_its_index(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
    assert not settings._read_folder(tmp_path)["time_per_token"]
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline", "expand_timesteps": true}')
    assert settings._read_folder(tmp_path)["time_per_token"]


def test_a_full_disk_is_one_line_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: Any = mock.Mock()
    monkeypatch.setattr(search, "search", lambda request: found)
    monkeypatch.setattr(command, "request_of", mock.Mock())
    full = mock.Mock(side_effect=OSError("plan could not be written: No space left"))
    shown = {"table": lambda *_: "the table", "notes": lambda _: ["a note"], "write_json": full}
    for name, function in shown.items():
        monkeypatch.setattr(report, name, function)
    assert command.run(OmegaConf.create({"rows": 3, "lora": {"rank": None}}), tmp_path) == 2
    printed = capsys.readouterr()
    assert "the table" in printed.out
    assert "error: plan could not be written: No space left" in printed.out + printed.err
