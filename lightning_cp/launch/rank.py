"""The life of one rank: load the configuration, call the target, leave word of what went wrong."""

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_cp.launch.job import Failure, FailureKind
from lightning_cp.launch.lifeline import hold_on_to_launcher
from lightning_cp.launch.machine import free_port
from lightning_cp.launch.rendezvous import use_inherited_listener
from lightning_cp.launch.stopping import Stopped

Target = Callable[[Any], None]
PACKAGE_DIR = Path(__file__).resolve().parents[1]


def load_target(target: str) -> Target:
    """The function named by `package.module:function` or `/path/to/file.py:function`."""
    place, _, name = target.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function: Target = getattr(module, name)
    return function


def run_target(target: str, config: Path, *, more_to_come: bool = False) -> int | None:
    """Calls the target with the configuration, and takes down the process group if it made one.

    After an error peers may never come, so the group is left to the end of the process.

    Args:
        more_to_come: these processes may run another job.
    Returns: then, the port at which they shall meet: in the store of this group they would find what it left there.
    """
    from omegaconf import OmegaConf

    load_target(target)(OmegaConf.load(config))
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    agreed = [free_port()]
    if more_to_come:
        torch.distributed.broadcast_object_list(agreed, src=0)
    from lightning_cp.comm.stall import stop_watch

    stop_watch()
    torch.distributed.destroy_process_group()
    return agreed[0] if more_to_come else None


def failure_of(error: BaseException, rank: int) -> Failure:
    """What is told about an exception: one line where it was raised to be read, else its traceback too."""
    cause = _root(error)
    text = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    if isinstance(cause, Stopped):
        return Failure(rank, FailureKind.STOPPED, str(cause), text, exit_code=cause.exit_code)
    if was_raised_for_the_user(cause):
        message = " ".join(str(cause).split()) or type(cause).__name__
        return Failure(rank, FailureKind.REFUSED, message, text)
    return Failure(rank, FailureKind.RAISED, f"{type(cause).__name__}: {cause}", text)


def was_raised_for_the_user(error: BaseException) -> bool:
    """Whether the message says all: errors of ours, and ValueErrors and the like that a line of ours raises."""
    kind = type(error)
    if kind.__module__.startswith("lightning_cp.") or kind.__name__ == "MisconfigurationException":
        return True
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and PACKAGE_DIR in Path(frames[-1].filename).resolve().parents
    meant = ours and (frames[-1].line or "raise").startswith("raise")  # not a mistake in that line
    return meant and kind in (ValueError, TypeError, FileNotFoundError)


def main(spec_path: str) -> None:
    """Entry of a rank that `LocalLauncher` started."""
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    hold_on_to_launcher(int(os.environ.pop("LIGHTNING_CP_LIFELINE")))
    use_inherited_listener(os.environ)
    rank = int(os.environ["RANK"])
    try:
        run_target(spec["target"], Path(spec["config"]))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        failure = failure_of(error, rank)
        failure.write(Path(spec["reports"]) / f"rank_{rank}.json")
        (Path(spec["log_dir"]) / f"rank_{rank}.traceback.txt").write_text(failure.traceback, encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.exit_code)  # an orderly exit could wait for peers that wait for this rank


def _load_file(path: Path) -> ModuleType:
    module_spec = importlib.util.spec_from_file_location(f"_lightning_cp_target_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{path} is no python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # so that what it defines can be pickled for DataLoader workers
    module_spec.loader.exec_module(module)
    return module


def _root(error: BaseException) -> BaseException:
    """Hydra wraps what a constructor raises; the user needs what was raised."""
    while type(error).__name__ == "InstantiationException" and error.__cause__ is not None:
        error = error.__cause__
    return error
