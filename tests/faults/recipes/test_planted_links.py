"""Links that others have planted in an output folder are replaced or refused: their targets stay as they are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lightning_cp import files
from lightning_cp.files import PRIVATE, new_file, no_link, writing_new
from lightning_cp.recipes.runs.saved_settings import save_settings
from tests.faults.writers import TEXT, WRITERS, outcome, prepare, settings, write_atomically


@pytest.mark.parametrize("to", ["file", "nothing"])
@pytest.mark.parametrize("names", [list(WRITERS)[:5], list(WRITERS)[5:]], ids=["first", "others"])
@pytest.mark.default("first")
def test_a_planted_link_is_not_written_through(tmp_path: Path, names: list[str], to: str) -> None:
    for name in names:
        _check_planted(tmp_path / name, name, to)


def _check_planted(tmp_path: Path, name: str, to: str) -> None:
    link, write = WRITERS[name]
    folder, target = tmp_path / "out", tmp_path / "target"
    (folder / link).parent.mkdir(parents=True)
    prepare(folder)
    if to == "file":
        target.write_text("precious")
        target.chmod(0o640)
    (folder / link).symlink_to(target)
    write(folder)
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert [path.name for path in folder.iterdir()], "something was written"
    if to == "file":
        assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("precious", 0o640)
    else:
        assert not target.exists()


def test_links_to_folders_are_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/a").write_text("precious")
    for name in ("a.json", "a.json.partial", "a.json.replaced"):
        (tmp_path / name).symlink_to(tmp_path / "target")
    write_atomically(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == TEXT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "target"]
    assert (tmp_path / "target/a").read_text() == "precious"


def test_files_that_are_continued_may_be_no_links_or_fifos(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        with pytest.raises(OSError, match=name), open(tmp_path / name, "a", opener=no_link):
            raise AssertionError("opened")


def test_a_folder_may_be_a_link_of_its_owner_but_of_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.json").write_text("precious")
    link = tmp_path / "run" / "linked"
    link.symlink_to(tmp_path / "elsewhere")
    new_file(link / "y.json")
    owners: dict[str, int] = {str(link): 7}
    monkeypatch.setattr(files, "_owner", lambda path: owners.get(str(path), os.geteuid()))
    message = "linked is a link of another user, which is not followed"
    for name in ("x.json", "z.json"):
        with pytest.raises(OSError, match=message), writing_new(link / name):
            raise AssertionError("created")
        with pytest.raises(OSError, match=message), open(link / name, "a", opener=no_link):
            raise AssertionError("opened")
    assert (tmp_path / "elsewhere" / "x.json").read_text() == "precious"
    assert not (tmp_path / "elsewhere" / "z.json").exists()
    owners[f"{tmp_path / 'run'}/."] = 7  # all of it is the other user's, as in a container that mounts their folder
    new_file(link / "y.json")


def test_files_with_settings_are_private(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("of an earlier run")
    (tmp_path / ".hydra" / "config.yaml").chmod(0o644)
    outcome(tmp_path).write(tmp_path)
    save_settings(tmp_path, *settings())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"config.yaml", "hydra.yaml", "overrides.yaml", "0.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {PRIVATE}
    assert (tmp_path / ".hydra" / "config.yaml").read_text() == "token: x\nhere: ${token}\n"
    assert (tmp_path / ".hydra" / "overrides.yaml").read_text() == "- token=x\n"
    assert (tmp_path / ".hydra" / "hydra.yaml").read_text().startswith("hydra:\n  overrides:\n")
