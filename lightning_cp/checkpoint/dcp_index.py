"""Read the index of a checkpoint in PyTorch's DCP format as plain data: nothing that it names is imported or called."""

import math
import pickle
import pickletools
from collections.abc import Container
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_cp.checkpoint.manifest import CheckpointError
from lightning_cp.compat.distributed_names import (
    GET_LAYOUT,
    MEMORY_FORMAT,
    MEMORY_FORMATS,
    PICKLED_NAMES,
    STORAGE_INFO,
    StorageInfo,
)

_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
# Opcodes that take objects from the stack, and how many; 0: those above the last mark.
_TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2, "TUPLE": 0, "APPENDS": 0, "SETITEMS": 0}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
INDEX = ".metadata"
_MAX_BYTES, _MAX_DIMS, _MAX_INT = 1 << 31, 64, (1 << 63) - 1
_DTYPES = {f"torch.{name}": x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
_NAMES = frozenset(
    [
        *(f"{metadata.__name__}.{name}" for name, x in vars(metadata).items() if isinstance(x, type)),
        *PICKLED_NAMES,
        *_DTYPES,
        "torch.Size",
        "collections.OrderedDict",
        "builtins.getattr",  # Python before 3.11.4 pickles enum members with it
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
    ]
)


class UnknownNameError(Exception):
    """A pickle contains a name that the caller did not allow."""


class Record:
    """A name of the pickle, or an object made from it.

    Args:
        name: `module.name`.
        args: constructor arguments of the object; None for a name.
    `state` is the argument for the object's `__setstate__`, or None.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None = None) -> None:
        self.name, self.args, self.state = name, args, None


def read_pickle(content: bytes, names: Container[str]) -> Any:
    """Unpickle into dicts, lists, tuples, plain values and `Record`s.

    Only the opcodes of pickled dataclasses, enums and plain values are supported: no persistent or extension ids, no
    sets, no keyword arguments. None acts on an object of this process.

    `pickle.Unpickler` is not used, although its `find_class` could return inert classes. With Python 3.11 to 3.13, a
    file of 1 MB that has a tuple nested a million times as the key of a dict ends the process (segmentation fault in
    the hash), tuples of tuples that share their items are hashed for ever, and a memo index of 2**28 takes 4 GB.

    Args:
        content: one pickle.
        names: allowed names, in the form `module.name`.
    Raises: UnknownNameError: it has another name. UnpicklingError and others: it is damaged or has another opcode.
    """
    stack, below, memo = list[Any](), list[list[Any]](), dict[int, Any]()  # below: the stacks under each mark
    arg: Any
    for opcode, arg, _ in pickletools.genops(content):
        kind = opcode.name
        if kind in _VALUES:
            stack.append(arg)
        elif kind in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if kind == "MEMOIZE" else arg] = stack[-1]
        elif kind in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif kind in _CONSTANTS:
            stack.append(_CONSTANTS[kind])
        elif kind in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if kind == "EMPTY_LIST" else {})
        elif kind == "MARK":
            below.append(stack)
            stack = []
        elif kind in _TAKEN:
            if count := _TAKEN[kind]:
                items = [stack.pop() for _ in range(count)][::-1]
            else:
                items, stack = stack, below.pop()
            if kind.startswith("TUPLE"):
                stack.append(tuple(items))
            else:
                _add(stack[-1], items, to_dict=kind.startswith("SET"))
        elif kind in ("GLOBAL", "STACK_GLOBAL"):
            last, first = (stack.pop(), stack.pop()) if kind == "STACK_GLOBAL" else reversed(arg.split(" ", 1))
            if f"{first}.{last}" not in names:
                raise UnknownNameError(f"{first}.{last}"[:200])
            stack.append(Record(f"{first}.{last}"))
        elif kind in ("REDUCE", "NEWOBJ"):
            args, made = stack.pop(), stack.pop()
            stack.append(_created(made, args))
        elif kind == "BUILD":
            state, made = stack.pop(), stack[-1]
            if not (type(made) is Record and made.args is not None and made.state is None):
                raise pickle.UnpicklingError("it sets the state of something other than a new object")
            made.state = state
        elif kind == "STOP":
            return stack.pop()
        elif kind not in ("PROTO", "FRAME"):
            raise pickle.UnpicklingError(f"it has the unsupported opcode {kind}")
    raise pickle.UnpicklingError("it has no end")


def _created(kind: Any, args: Any) -> Any:
    if not (type(kind) is Record and kind.args is None and kind.state is None and type(args) is tuple):
        raise pickle.UnpicklingError("it creates an object of something other than a class")
    # An OrderedDict becomes a dict: the same opcodes fill it.
    return {} if kind.name == "collections.OrderedDict" and not args else Record(kind.name, args)


def _add(target: Any, items: list[Any], *, to_dict: bool) -> None:
    if type(target) is list and not to_dict:
        target.extend(items)
        return
    if type(target) is not dict or not to_dict or len(items) % 2:
        raise pickle.UnpicklingError("it adds items to something other than a list or a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int, Record):  # the hash of a deeply nested tuple overflows the stack
            raise pickle.UnpicklingError(f"a dict has a key of the unsupported type {type(key).__name__}")
        target[key] = value


class _DamagedError(Exception):
    """An index that differs from the format that DCP writes."""


def read_dcp_index(folder: Path) -> Metadata:
    """Read and check the index of a folder written by `torch.distributed.checkpoint.save`.

    The file is read as plain data, and a new index is built from it. Checks: sizes are consistent; files lie inside
    the folder and are long enough. `planner_data` (nested dicts) is left out: loading into a state does not need it.

    Raises: CheckpointError: it is missing or damaged, or holds anything that DCP does not write.
    """
    path = folder / INDEX
    try:
        if path.stat().st_size > _MAX_BYTES or not path.is_file():
            raise _DamagedError(f"it is not a file, or is larger than {_MAX_BYTES} bytes")
        return _Index(folder, read_pickle(path.read_bytes(), _NAMES)).build()
    except UnknownNameError as error:
        raise CheckpointError(
            f"{folder} holds more than tensors and plain values ({error}): load it with weights_only=False only if "
            "you trust whoever wrote it"
        ) from error
    except (_DamagedError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder} is truncated or damaged: its {INDEX} cannot be read: {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        kind = type(error).__name__
        raise CheckpointError(f"{folder} is truncated or damaged: its {INDEX} cannot be read ({kind})") from error


class _Index:
    """Build `Metadata` from the records of a folder's index."""

    def __init__(self, folder: Path, content: Any) -> None:
        self._folder, self._fields = folder, _fields(content, "Metadata")
        self._file_bytes: dict[str, int] = {}

    def build(self) -> Metadata:
        """Check the records and build the index. Raises: _DamagedError: a record differs from DCP's format."""
        entries = {_text(name): _entry(x) for name, x in _dict(self._fields.get("state_dict_metadata")).items()}
        stored = dict[MetadataIndex, StorageInfo]()
        for key, value in _dict(self._fields.get("storage_data")).items():
            index, info = _storage_key(key), self._storage(value)
            if index in stored or index.fqn not in entries:
                raise _DamagedError(f"{index.fqn[:200]} is stored twice, or has no metadata")
            stored[index] = info
        unused = len(stored)
        for name, entry in entries.items():
            chunks = len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 1
            unused -= chunks
            if unused < 0:  # before chunks are built: many tensors may share one huge list
                raise _DamagedError("it lists more chunks than are stored")
            if isinstance(entry, TensorStorageMetadata):
                entry.chunks = _chunks(name, entry)
                _check_stored(name, entry, stored)
        return Metadata(entries, storage_data=stored)

    def _storage(self, record: Any) -> StorageInfo:
        fields = _fields(record, STORAGE_INFO)
        name = _text(fields.get("relative_path"))
        if fields.get("transform_descriptors"):
            raise _DamagedError(f"{name[:200]} is compressed, which is not supported")
        offset, length = _integer(fields.get("offset")), _integer(fields.get("length"))
        if name not in self._file_bytes:
            self._file_bytes[name] = self._size_of(name)
        if offset + length > self._file_bytes[name]:
            raise _DamagedError(f"{name} has {self._file_bytes[name]} bytes, but {offset + length} are needed")
        return StorageInfo(name, offset, length)

    def _size_of(self, name: str) -> int:
        inside = PurePosixPath(name)
        if not name or inside.is_absolute() or ".." in inside.parts or "\0" in name:
            raise _DamagedError(f"the path {name[:200]!r} is outside of the folder")
        file = self._folder / inside
        if not file.is_file():  # links to files are valid: download caches use them
            raise _DamagedError(f"{name[:200]} is missing")
        return file.stat().st_size


def _entry(record: Any) -> BytesStorageMetadata | TensorStorageMetadata:
    """Build the metadata of one name; the chunks of a tensor are left as records."""
    if isinstance(record, Record) and record.name.endswith(f".{BytesStorageMetadata.__name__}"):
        _fields(record, BytesStorageMetadata.__name__)
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    if type(fields.get("chunks")) is not list:
        raise _DamagedError("a tensor has no list of chunks")
    return TensorStorageMetadata(_properties(fields.get("properties")), _size(fields.get("size")), fields["chunks"])


def _properties(record: Any) -> TensorProperties:
    state: Any = _object_of(record, "TensorProperties").state
    if type(state) is not tuple or len(state) != 5:
        raise _DamagedError("a tensor has no valid properties")
    dtype, layout, requires_grad, memory_format, pin_memory = state
    if not (isinstance(dtype, Record) and dtype.args is None and dtype.name in _DTYPES):
        raise _DamagedError("a tensor has no valid dtype")
    if _object_of(layout, GET_LAYOUT).args != ("torch.strided",):
        raise _DamagedError("a tensor is not strided, which is not supported")
    _check_memory_format(memory_format)
    if type(requires_grad) is not bool or type(pin_memory) is not bool:
        raise _DamagedError("a tensor has invalid properties")
    return TensorProperties(dtype=_DTYPES[dtype.name], requires_grad=requires_grad, pin_memory=pin_memory)


def _check_memory_format(record: Any) -> None:
    """Check a pickled enum member, stored by value or by `getattr`. Raises: _DamagedError: it is not one."""
    if isinstance(record, Record) and record.name == "builtins.getattr":
        kind, name = record.args if record.args is not None and len(record.args) == 2 else (None, None)
        is_kind = isinstance(kind, Record) and kind.args is None and kind.name.endswith(f".{MEMORY_FORMAT}")
        is_member = is_kind and type(name) is str and name in MEMORY_FORMATS and record.state is None
    else:
        args = _object_of(record, MEMORY_FORMAT).args or ()
        is_member = len(args) == 1 and type(args[0]) is int and args[0] in range(len(MEMORY_FORMATS))
    if not is_member:
        raise _DamagedError(
            "a tensor has an unknown memory format (builtins.getattr is allowed for memory formats only)"
        )


def _chunks(name: str, entry: TensorStorageMetadata) -> list[ChunkStorageMetadata]:
    """Build the chunks of a tensor. Raises: _DamagedError: they do not cover the tensor exactly."""
    chunks, starts, elements = [], set(), 0
    for record in entry.chunks:
        fields = _fields(record, "ChunkStorageMetadata")
        offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
        inside = len(offsets) == len(sizes) == len(entry.size)
        if not inside or any(o + n > m for o, n, m in zip(offsets, sizes, entry.size, strict=True)):
            raise _DamagedError(f"{name[:200]} has a chunk outside of its shape")
        if offsets in starts:
            raise _DamagedError(f"{name[:200]} has two chunks at the same offset")
        starts.add(offsets)
        elements += math.prod(sizes)
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    if elements != math.prod(entry.size):
        raise _DamagedError(f"{name[:200]} has {math.prod(entry.size)} elements, but its chunks hold {elements}")
    return chunks


def _check_stored(name: str, entry: TensorStorageMetadata, stored: dict[MetadataIndex, StorageInfo]) -> None:
    """Check that the files hold all chunks. Raises: _DamagedError: a chunk is missing, or larger than its data."""
    for chunk in entry.chunks:
        info = stored.get(MetadataIndex(name, chunk.offsets))
        if info is None or math.prod(chunk.sizes) * entry.properties.dtype.itemsize > info.length:
            raise _DamagedError(f"{name[:200]} has a chunk with missing or too little data in the files")


def _storage_key(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields.get("fqn")), None if offset is None else _size(offset), None if index is None else _integer(index)
    )


def _object_of(value: Any, kind: str) -> Record:
    """Return a record of an object of class `kind`. Raises: _DamagedError: it is not one."""
    if not isinstance(value, Record) or value.args is None or value.name.rpartition(".")[2] != kind:
        raise _DamagedError(f"expected a {kind}, got a {type(value).__name__}")
    return value


def _fields(value: Any, kind: str) -> dict[Any, Any]:
    record = _object_of(value, kind)
    return _dict({} if record.state is None else record.state)


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise _DamagedError(f"expected a dict, got a {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _DamagedError(f"expected a string as name, got a {type(value).__name__}")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise _DamagedError(f"a size or an offset must be an integer from 0 to {_MAX_INT}")
    return value


def _size(value: Any) -> torch.Size:
    """Convert the record of `torch.Size((2, 3))`."""
    args = _object_of(value, "Size").args or ()
    dims = args[0] if len(args) == 1 and type(args[0]) in (tuple, list) else None
    if dims is None or len(dims) > _MAX_DIMS or math.prod(map(_integer, dims)) > _MAX_INT:
        raise _DamagedError("a tensor has an invalid shape")
    return torch.Size(dims)
