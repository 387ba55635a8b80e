"""Test which exceptions are reported in one line, and which with their traceback."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from lightning_cp import ContextParallelConfig
from lightning_cp.app.training.records import read_metrics
from lightning_cp.checkpoint import CheckpointError
from lightning_cp.checkpoint.folder import EARLIER_KEPT
from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint
from lightning_cp.launch.job import FailureKind
from lightning_cp.launch.rank import failure_of


def _caught(action: object, *args: object) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action(*args)  # type: ignore[operator]
    return caught.value


def test_what_we_raise_for_the_user_is_one_line() -> None:
    refused = failure_of(_caught(lambda: ContextParallelConfig(ring_degree=0)), rank=1)
    assert refused.kind is FailureKind.REFUSED
    assert refused.describe() == refused.message
    assert "ring" in refused.message
    assert failure_of(CheckpointError("resume=x: cut short"), rank=0).kind is FailureKind.REFUSED


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("lightning_cp.checkpoint.store.save_file", fails)
    failure = failure_of(_caught(save_checkpoint, tmp_path, Checkpoint(1, {"a": {"x": torch.zeros(1)}}, {})), rank=0)
    assert failure.kind is FailureKind.REFUSED
    assert "a.safetensors could not be written: No space left on device. " in failure.message
    assert failure.message.endswith(EARLIER_KEPT)


def test_a_mistake_in_our_own_code_or_elsewhere_has_its_traceback() -> None:
    mistake = failure_of(_caught(read_metrics, 3), rank=1)  # an AttributeError or TypeError within the package
    assert mistake.kind is FailureKind.RAISED
    assert "(rank 1)" in mistake.describe()
    assert "records.py" in mistake.describe()
    assert failure_of(_caught(int, "x"), rank=0).kind is FailureKind.RAISED
