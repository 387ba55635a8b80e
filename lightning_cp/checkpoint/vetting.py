"""Looks through a DCP checkpoint of PyTorch's before PyTorch unpickles it."""

import io
import pickle
import re
from collections import OrderedDict
from enum import Enum
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.serialization import _get_layout
from typing_extensions import override

from lightning_cp.checkpoint.manifest import CheckpointError


def _member(kind: object, name: str) -> Enum:
    """What `getattr` may do in an index: Python before 3.11.4 pickles members of an Enum so."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("builtins.getattr")


_METADATA = ".metadata"
_HARMLESS: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): x
        for name, x in vars(metadata).items()
        if getattr(x, "__module__", "") == metadata.__name__
    },
    **{(filesystem.__name__, name): getattr(filesystem, name) for name in ("_StorageInfo", "_StoragePrefix")},
    **{("torch", name): x for name, x in vars(torch).items() if isinstance(x, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "getattr"): _member,
    **{
        (module, x.__name__): x
        for x in (Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath)
        for module in ("pathlib", "pathlib._local")
    },
}


def check_harmless(folder: Path) -> None:
    """Makes sure that loading a folder that `torch.distributed.checkpoint.save` wrote runs no code of strangers.

    PyTorch unpickles its index and all that is no tensor. Here the index is read with the few classes that it is made
    of, and the rest as `weights_only` does.

    Raises: CheckpointError: something in it is neither a tensor nor a plain value.
    """
    try:
        with (folder / _METADATA).open("rb") as file:
            index = _Unpickler(file).load()
        for key, stored in index.storage_data.items():
            if isinstance(index.state_dict_metadata.get(key.fqn), metadata.BytesStorageMetadata):
                with (folder / stored.relative_path).open("rb") as file:
                    file.seek(stored.offset)
                    torch.load(io.BytesIO(file.read(stored.length)), weights_only=True)
    except (AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{folder} is cut short: its {_METADATA} or what it names cannot be read ({error!r})"
        ) from error
    except pickle.UnpicklingError as error:
        what = re.search(r"GLOBAL (\S+)|^(\S+)$", str(error))  # torch's text, or that of the reader below
        raise CheckpointError(
            f"{folder} holds more than tensors and plain values ({what[0] if what else type(error).__name__}): load it "
            "with weights_only=False if you trust whoever wrote it"
        ) from error


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _HARMLESS[module, name]
