"""A process with children that are killed while they write checkpoints. Run by test_killed.py; prints what it saw.

python -m tests.unit.checkpoint.killed FOLDER
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lightning_cp.checkpoint import folder as folders
from lightning_cp.checkpoint import latest_checkpoint, remove_partials
from lightning_cp.checkpoint.manifest import PARTIAL, Manifest, read_manifest
from lightning_cp.checkpoint.store import Checkpoint, flatten_state, load_checkpoint, save_checkpoint


def states(step: int) -> dict[str, Any]:
    return {name: {"weight": torch.full((300, 40), float(step)), "step": step} for name in ("model", "optimizer")}


def newest_step(parent: Path) -> int:
    """The step of the newest checkpoint. All its tensors are that step's."""
    newest = latest_checkpoint(parent.parent)
    assert newest is not None, f"nothing is left: {sorted(path.name for path in parent.iterdir())}"
    found = load_checkpoint(newest, states(-1))
    tensors, _ = flatten_state(dict(found.states))
    assert all((x == found.step).all() for x in tensors.values())
    assert found.states["model"]["step"] == found.step == read_manifest(newest).step
    return found.step


def dies_at(moment: int) -> None:
    """End the process without cleanup at the n-th of its calls that change the disk."""
    left = [moment]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def dies_or_calls(*args: Any, **settings: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **settings)

        return dies_or_calls

    for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    Manifest.write = counted(Manifest.write)  # type: ignore[method-assign]
    shutil.rmtree = counted(shutil.rmtree)
    folders.exchange_folders = counted(folders.exchange_folders)
    folders.shutil.rmtree = shutil.rmtree  # type: ignore[attr-defined]


def child(work: Callable[[], None]) -> bool:
    """True if a fork of this process ended by itself."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def remove_abandoned(parent: Path) -> None:
    """Do the first steps of the next run, wherever its own folder is. Nothing that was killed stays for long."""
    remove_partials(parent.parent.parent)
    left = [path.name for path in parent.glob(f"{PARTIAL}*") if not is_unnamed(path)]
    assert not left, left


def is_unnamed(folder: Path) -> bool:
    """True if the writer was killed before it wrote the owner's name: such a folder is removed after 5 seconds."""
    owner = folder / ".owner"
    return not owner.is_file() or not owner.read_text()


def at_every_moment(parent: Path, *, step: int) -> Iterator[int]:
    """Write this step next to (or over) step 5, killed one call later each time. Yield the newest step after each."""
    for moment in range(200):
        shutil.rmtree(parent, ignore_errors=True)
        save_checkpoint(parent, Checkpoint(5, states(5), {}))

        def dying(moment: int = moment) -> None:
            dies_at(moment)
            save_checkpoint(parent, Checkpoint(step, states(step), {}), keep=1)

        survived = child(dying)
        remove_abandoned(parent)
        yield newest_step(parent)
        if survived:
            return
    raise AssertionError("it never got to the end")


def main() -> None:
    parent = Path(sys.argv[1]) / "run" / "checkpoints"
    torch.set_num_threads(1)
    folders._IDLE_S = -1.0
    os.fsync = lambda _: None  # the machine stays on
    for step in (5, 6):
        print(*at_every_moment(parent, step=step))
    folders.exchange_folders = lambda *_: False
    print(*at_every_moment(parent, step=5))


if __name__ == "__main__":
    main()
