import os
import pickle
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_cp.checkpoint import CheckpointError
from lightning_cp.checkpoint.vetting import check_harmless

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Runs:
    """Code that runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


class Gets:
    """What `getattr` gives, when it is unpickled."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self.of, self.name)


def written(folder: Path, extra: object) -> Path:
    state = {
        "model": {"a": torch.randn(3), "b": torch.ones(2, dtype=torch.bfloat16)},
        "extra": extra,
        "lr": (0.1, None),
    }
    save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_tensors_and_plain_values_pass(tmp_path: Path) -> None:
    check_harmless(written(tmp_path / "a", {"betas": [0.9, 0.99], "name": "x"}))


def test_objects_and_code_are_refused_and_do_not_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Fraction.*weights_only=False"):
        check_harmless(written(tmp_path / "a", Fraction(1, 3)))
    with pytest.raises(CheckpointError, match="mkdir"):
        check_harmless(written(tmp_path / "b", Runs(tmp_path / "ran")))
    folder = written(tmp_path / "c", 1)
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        check_harmless(folder)
    assert not (tmp_path / "ran").exists()
    for content in (pickle.dumps({"a": 1}), b""):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match="cut short"):
            check_harmless(folder)


def test_getattr_gives_members_of_an_enum_and_nothing_else(tmp_path: Path) -> None:
    """Python before 3.11.4 pickles a tensor's memory format as `getattr(_MEM_FORMAT_ENCODING, name)`."""
    folder = written(tmp_path / "a", 1)
    found = pickle.loads(pickle.dumps(Gets(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")))
    assert found is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = {"format": Gets(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")}
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    check_harmless(folder)
    for of, name in ((_MEM_FORMAT_ENCODING, "__class__"), (Path, "home"), (torch.float32, "itemsize")):
        index.planner_data = {"format": Gets(of, name)}
        (folder / ".metadata").write_bytes(pickle.dumps(index))
        with pytest.raises(CheckpointError, match=r"builtins\.getattr"):
            check_harmless(folder)
