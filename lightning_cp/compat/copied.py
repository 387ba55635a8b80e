"""Check functions of other packages that lightning_cp replaces by a copy with other steps."""

from __future__ import annotations

import builtins
import hashlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_cp.compat.versions import incompatible


class Copied(NamedTuple):
    """A function that one of ours replaces.

    Attributes:
        parameters: its parameters.
        steps: names that its code uses, without built-in ones.
        digest: `source_digest` of the tested versions. A test compares it.
    """

    parameters: tuple[str, ...]
    steps: frozenset[str]
    digest: str


# lightning.pytorch's ModelParallelStrategy.setup: the same in 2.6.0 and 2.6.6.
TRAINER_SETUP = Copied(
    parameters=("self", "trainer"),
    steps=frozenset(
        {
            "accelerator",
            "setup",
            "model",
            "lightning_module",
            "is_overridden",
            "__class__",
            "modules",
            "torch.distributed.fsdp",
            "FullyShardedDataParallel",
            "_materialize_distributed_module",
            "root_device",
            "precision_plugin",
            "convert_module",
            "model_to_device",
            "barrier",
            "state",
            "fn",
            "TrainerFn",
            "FITTING",
            "setup_optimizers",
            "setup_precision_plugin",
            "_optimizers_to_device",
            "optimizers",
        }
    ),
    digest="ba28ed8e9eabb6d5243731e9d9290e4f",
)


def check_unchanged(function: Callable[..., Any], copied: Copied) -> None:
    """Check the parameters and the steps of a function that one of ours replaces.

    Raises: IncompatibleVersionError: the function takes other parameters, or uses other names: the installed version
        does something else, which our copy would leave out.
    """
    package, name = function.__module__.split(".")[0], f"{function.__module__}.{function.__qualname__}"
    parameters = tuple(inspect.signature(function).parameters)
    if parameters != copied.parameters:
        raise incompatible(package, f"{name} takes {parameters} and not {copied.parameters}")
    code: Any = function.__code__
    changed = sorted((set(code.co_names) - set(dir(builtins))) ^ copied.steps)
    if changed:
        raise incompatible(package, f"{name} has changed in {', '.join(changed)}; lightning_cp has a copy of it")


def source_digest(function: Callable[..., Any]) -> str:
    """Return a digest of a function's source without white space."""
    source = "".join(inspect.getsource(function).split())
    return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
