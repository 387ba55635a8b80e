"""Private names of torch with which operators are watched."""

from __future__ import annotations

from typing import Any

import torch

from lightning_cp.compat.torch_names import DispatchKey
from lightning_cp.compat.versions import private_names

with private_names("torch"):
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["StorageWeakRef", "TorchDispatchMode", "address_of", "group_among", "run_body", "schema_of"]


def run_body(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the function that a custom operator is made of, so that the active dispatch mode sees what it calls."""
    return operator._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator: its name, arguments and results."""
    return operator._schema


def address_of(storage: Any) -> int:
    """Return the address of the object behind a storage, also of one without memory."""
    address: int = storage._cdata
    return address


def group_among(args: Any) -> torch.distributed.ProcessGroup:
    """Return the process group among the arguments of an operator of torch.distributed."""
    boxed = next(x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()))
    return torch.distributed.ProcessGroup.unbox(boxed)
