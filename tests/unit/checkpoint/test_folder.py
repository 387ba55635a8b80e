"""Folders of running processes stay, folders of ended processes are removed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import lightning_cp
from lightning_cp.checkpoint import remove_partials
from lightning_cp.checkpoint.folder import drop_scratch, open_scratch, temporary_folder
from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint

_WRITES = (
    "import os, sys; from pathlib import Path; from lightning_cp.checkpoint.folder import open_scratch\n"
    "print(open_scratch(Path(sys.argv[1]), 3), flush=True); sys.stdin.read()"
)
_LAUNCHES = (
    "import sys; from lightning_cp.checkpoint.folder import temporary_folder\n"
    "with temporary_folder() as folder: print(folder, flush=True); sys.stdin.read()"
)


def started(script: str, *args: str, **environment: str) -> tuple["subprocess.Popen[str]", Path]:
    command = [sys.executable, "-c", script, *args]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env={**os.environ, **environment}, **pipes)  # type: ignore[call-overload]
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def killed(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_a_partial_goes_when_its_writer_is_dead_and_not_before(tmp_path: Path) -> None:
    parent = tmp_path / "2026-01-01" / "10-00-00" / "checkpoints"
    process, partial = started(_WRITES, str(parent))
    try:
        remove_partials(tmp_path)
        assert partial.is_dir()
        with pytest.raises(FileExistsError, match="another process"):
            open_scratch(parent, 3)
    finally:
        killed(process)
    remove_partials(tmp_path)
    assert list(parent.iterdir()) == []


def test_a_partial_of_another_machine_stays_until_it_is_old(tmp_path: Path) -> None:
    process, partial = started(_WRITES, str(tmp_path / "checkpoints"))
    killed(process)
    (partial / ".owner").write_text("elsewhere")
    remove_partials(tmp_path)
    assert partial.is_dir()
    for path in (partial / ".owner", partial):
        os.utime(path, (0, 0))
    remove_partials(tmp_path)
    assert not partial.exists()
    partial.mkdir()
    (partial / ".owner").touch()  # killed before it wrote the name
    remove_partials(tmp_path)
    assert partial.is_dir()
    for path in (partial / ".owner", partial):
        os.utime(path, (time.time() - 9, time.time() - 9))
    remove_partials(tmp_path)
    assert not partial.exists()


def test_a_save_sweeps_its_own_folder_whatever_is_there(tmp_path: Path) -> None:
    (tmp_path / ".partial_00000009").mkdir()
    save_checkpoint(tmp_path, Checkpoint(3, {"model": {"x": torch.ones(2)}}, {}))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_where_there_are_no_locks_only_the_own_folder_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    partial = open_scratch(tmp_path / "checkpoints", 3)
    remove_partials(tmp_path)
    assert partial.is_dir()
    drop_scratch(tmp_path / "checkpoints", 3)
    (tmp_path / "checkpoints" / ".partial_00000009").mkdir()
    save_checkpoint(tmp_path / "checkpoints", Checkpoint(3, {}, {}))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]


def test_a_launchers_folder_goes_with_it_or_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process, folder = started(_LAUNCHES, TMPDIR=str(tmp_path))
    try:
        with temporary_folder() as ours:
            assert sorted(tmp_path.iterdir()) == sorted([folder, ours])
    finally:
        killed(process)
    assert list(tmp_path.iterdir()) == [folder]
    with temporary_folder() as ours:
        assert list(tmp_path.iterdir()) == [ours]
    assert list(tmp_path.iterdir()) == []


def test_recipes_make_temporary_folders_that_a_later_run_removes_after_a_kill() -> None:
    sources = (Path(lightning_cp.__file__).parents[1] / "recipes").rglob("*.py")
    assert not [
        path for path in sources if "tempfile.TemporaryDirectory" in path.read_text() or "mkdtemp" in path.read_text()
    ]
