"""Pickles that run code when they are loaded. The code makes a folder, so the test sees whether it ran."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

METADATA = "torch.distributed.checkpoint.metadata"
FORMATS = "_MEM_FORMAT_ENCODING"


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def text(value: object) -> bytes:
    encoded = str(value).encode()
    return pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded


def name(module: str, qualified: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{qualified}\n".encode()


def call(function: bytes, *args: bytes) -> bytes:
    return function + pickle.MARK + b"".join(args) + pickle.TUPLE + pickle.REDUCE


def attribute(of: bytes, which: str) -> bytes:
    return call(name("builtins", "getattr"), of, text(which))


def by_build(ran: Path) -> bytes:
    """BUILD changes the enum, so that a reader that allows only its members does not see a difference."""
    enum, code = name(METADATA, FORMATS), f"__import__('os').mkdir({str(ran)!r})"
    real = [(one.name, call(enum, pickle.BININT1 + bytes([one.value]))) for one in _MEM_FORMAT_ENCODING]
    members = b"".join(text(one) + enum for one in ("__new__", "__globals__", "get"))
    members += b"".join(text(one) + member for one, member in real)
    values = b"".join(text(one) + enum for one in ("__builtins__", "eval", code))
    values += b"".join(pickle.BININT1 + bytes([i]) + member for i, (_, member) in enumerate(real))
    state = pickle.MARK + text("_member_map_") + pickle.EMPTY_DICT + pickle.MARK + members + pickle.SETITEMS
    state += text("_value2member_map_") + pickle.EMPTY_DICT + pickle.MARK + values + pickle.SETITEMS
    changed = enum + pickle.NONE + pickle.EMPTY_DICT + state + pickle.SETITEMS + pickle.TUPLE2 + pickle.BUILD
    builtins = call(attribute(attribute(attribute(enum, "__new__"), "__globals__"), "get"), text("__builtins__"))
    return changed + call(call(attribute(builtins, "get"), text("eval")), text(code))


def by_inst(ran: Path) -> bytes:
    return pickle.MARK + text(ran) + pickle.INST + b"posix\nmkdir\n"


def by_obj(ran: Path) -> bytes:
    return pickle.MARK + name("posix", "mkdir") + text(ran) + pickle.OBJ


def by_stack_global(ran: Path) -> bytes:
    return pickle.PROTO + b"\x04" + call(text("pathlib") + text("os.mkdir") + pickle.STACK_GLOBAL, text(ran))


def by_memo(ran: Path) -> bytes:
    return name("posix", "mkdir") + pickle.BINPUT + b"\xf0" + call(pickle.BINGET + b"\xf0", text(ran))


def by_popen(ran: Path) -> bytes:
    """NEWOBJ of a class with a constructor that runs a command."""
    command = pickle.EMPTY_LIST + pickle.MARK + text("mkdir") + text(ran) + pickle.APPENDS
    return call(name("subprocess", "Popen"), command)


def by_newobj(ran: Path) -> bytes:
    return name("posix", "mkdir") + text(ran) + pickle.TUPLE1 + pickle.NEWOBJ


def by_newobj_ex(ran: Path) -> bytes:
    kind, args = name(METADATA, "Metadata"), text(ran) + pickle.TUPLE1
    named = pickle.EMPTY_DICT + text("planner_data") + by_reduce(ran) + pickle.SETITEM
    return kind + args + named + pickle.NEWOBJ_EX


def by_reduce(ran: Path) -> bytes:
    return call(name("posix", "mkdir"), text(ran))


def by_getattr(ran: Path) -> bytes:
    return call(attribute(name("pathlib", "Path"), "mkdir"), call(name("pathlib", "PosixPath"), text(ran)))


def by_setstate(ran: Path) -> bytes:
    """BUILD of an object; its class gets a `__setstate__` first."""
    kind = name(METADATA, "BytesStorageMetadata")
    setter = pickle.NONE + pickle.EMPTY_DICT + text("__setstate__") + name("posix", "mkdir") + pickle.SETITEM
    changed = kind + setter + pickle.TUPLE2 + pickle.BUILD
    return changed + kind + pickle.EMPTY_TUPLE + pickle.NEWOBJ + text(ran) + pickle.BUILD


def by_slots(ran: Path) -> bytes:
    """BUILD of an instance with a state for slots, which sets any attribute."""
    instance = name(METADATA, "StorageMeta") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    return instance + pickle.NONE + pickle.EMPTY_DICT + text("x") + by_reduce(ran) + pickle.SETITEM + b"\x86b"


def by_append(ran: Path) -> bytes:
    """APPEND calls `append`, SETITEM calls `__setitem__` of whatever is on the stack."""
    return name(METADATA, "StorageMeta") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + text(ran) + pickle.APPEND


def by_extension(ran: Path) -> bytes:
    return call(pickle.EXT1 + b"\xf0", text(ran))


def by_persistent_id(ran: Path) -> bytes:
    return text(ran) + pickle.BINPERSID


def by_rebuilding(ran: Path) -> bytes:
    return call(name("torch._utils", "_rebuild_tensor_v2"), text(ran), text("x"))


def by_import(ran: Path) -> bytes:
    return call(name("importlib", "import_module"), text(ran))


GADGETS: tuple[Callable[[Path], bytes], ...] = (
    by_reduce,
    by_build,
    by_inst,
    by_obj,
    by_stack_global,
    by_memo,
    by_popen,
    by_newobj,
    by_newobj_ex,
    by_getattr,
    by_setstate,
    by_slots,
    by_append,
    by_extension,
    by_persistent_id,
    by_rebuilding,
    by_import,
)

RUN_IN_PICKLE = (*GADGETS[:7], by_newobj_ex, by_getattr, by_setstate, by_slots)


def before(pickled: bytes, gadget: bytes) -> bytes:
    """A pickle of protocol 2 that runs a gadget first, and then is what it was. (No POP, which readers may refuse.)"""
    assert pickled[:2] == pickle.PROTO + b"\x02"
    return pickled[:2] + gadget + pickled[2:]


def add_to_archive(path: Path, gadget: bytes) -> None:
    """Puts a gadget before what a file of `torch.save` holds."""
    old = path.with_suffix(".old")
    shutil.move(path, old)
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            target.writestr(entry.filename, before(content, gadget) if entry.filename.endswith("data.pkl") else content)
    old.unlink()


def saved_with(path: Path, content: object, gadget: bytes) -> Path:
    torch.save(content, path)
    add_to_archive(path, gadget)
    return path
