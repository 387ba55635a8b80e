"""Checkpoints from untrusted authors are read without running their code."""

from __future__ import annotations

import copyreg
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_cp.checkpoint import CheckpointError
from lightning_cp.checkpoint.dcp_index import read_dcp_index
from lightning_cp.checkpoint.safe_load import check_file, load_dcp
from tests.faults.checkpoint import gadgets
from tests.faults.checkpoint.gadgets import GADGETS, RUN_IN_PICKLE, Runs, before, call, name, saved_with, text

pytestmark = pytest.mark.filterwarnings("ignore")
DTYPES = sorted(  # all its tensors can be filled
    {x for x in vars(torch).values() if isinstance(x, torch.dtype) and (x.is_floating_point or x.is_complex)}
    - {torch.float4_e2m1fn_x2}
    | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32},
    key=str,
)


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {str(dtype): torch.full((3, 2), value).to(dtype) for dtype in DTYPES},
        "shapes": [torch.full((4,), value), torch.tensor(value), torch.zeros(0, 5), torch.full((1, 3, 4, 4), value)],
        "optimizer": {"lr": value, "betas": (value, 0.5), "name": "x" if value else "", "empty": {}, "none": None},
    }


def written(folder: Path, content: dict[str, Any] | None = None) -> Path:
    """A folder as DCP writes it."""
    save(content or state(), checkpoint_id=folder, no_dist=True)
    return folder


def loaded(folder: Path) -> dict[str, Any]:
    found = state(0.0)
    load_dcp(found, folder)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(
            one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _attributes(kind: type) -> dict[str, Any]:
    return {name: x for name, x in vars(kind).items() if name != "__slotnames__"}  # pickle notes it at its first use


@pytest.fixture
def ran(tmp_path: Path) -> Iterator[Path]:
    """Folders that gadgets make. Fails the test if one has run, or has changed a class."""
    classes = [x for x in vars(metadata).values() if isinstance(x, type)]
    as_they_were = [_attributes(x) for x in classes]
    path = tmp_path / "ran"
    yield path
    for kind, attributes in zip(classes, as_they_were, strict=True):
        assert _attributes(kind) == attributes, kind
    assert not path.exists(), "it has run"


def index_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def test_what_dcp_writes_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "saved")
    ours, theirs = read_dcp_index(folder), index_of(folder)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert same(loaded(folder), state())


def test_every_protocol_that_torch_may_use_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "saved")
    for protocol in (2, 3, 4, 5):
        (folder / ".metadata").write_bytes(pickle.dumps(index_of(folder), protocol))
        assert same(loaded(folder), state()), protocol


def test_members_of_an_enum_that_old_pythons_get_by_getattr_are_read(tmp_path: Path) -> None:
    """Python before 3.11.4 pickles a tensor's memory format as `getattr(_MEM_FORMAT_ENCODING, name)`."""
    folder, old = written(tmp_path / "saved"), copyreg.dispatch_table
    theirs = index_of(folder)
    copyreg.pickle(_MEM_FORMAT_ENCODING, lambda member: (getattr, (_MEM_FORMAT_ENCODING, member.name)))
    try:
        content = pickle.dumps(theirs)
    finally:
        del old[_MEM_FORMAT_ENCODING]
    assert b"getattr" in content
    (folder / ".metadata").write_bytes(content)
    assert same(loaded(folder), state())


def test_no_gadget_runs_in_an_index(tmp_path: Path, ran: Path) -> None:
    folder = written(tmp_path / "saved")
    whole = pickle.dumps(index_of(folder), 2)
    for gadget in GADGETS:
        (folder / ".metadata").write_bytes(before(whole, gadget(ran)))
        copyreg.add_extension("posix", "mkdir", 0xF0)
        try:
            with pytest.raises(CheckpointError, match=r"weights_only=False|damaged") as caught:
                loaded(folder)
        finally:
            copyreg.remove_extension("posix", "mkdir", 0xF0)
        assert not ran.exists(), gadget.__name__
        assert str(folder) in str(caught.value), gadget.__name__
        assert len(str(caught.value)) < 600, gadget.__name__


def test_no_gadget_runs_in_a_file(tmp_path: Path, ran: Path) -> None:
    for gadget in GADGETS:
        path = saved_with(tmp_path / "all.ckpt", state(), gadget(ran))
        with pytest.raises(CheckpointError, match=r"all\.ckpt .*(weights_only=False|damaged|pickle|id)") as caught:
            check_file(path)
        assert not ran.exists(), gadget.__name__
        assert len(str(caught.value)) < 900, gadget.__name__


_UNPICKLES = "import pickle, sys, torch.distributed.checkpoint; pickle.load(open(sys.argv[1], 'rb'))"


@pytest.mark.full
def test_the_gadgets_do_run_where_they_are_unpickled(tmp_path: Path) -> None:
    """Each in a process of its own: some change the classes that others use."""
    index = pickle.dumps(index_of(written(tmp_path / "saved")), 2)
    for gadget in RUN_IN_PICKLE:
        file, ran = tmp_path / gadget.__name__, tmp_path / f"ran {gadget.__name__}"
        file.write_bytes(before(index, gadget(ran)))
        unpickled = subprocess.run([sys.executable, "-c", _UNPICKLES, file], timeout=60, check=False)
        assert ran.is_dir(), gadget.__name__
        assert unpickled.returncode == 0, gadget.__name__


def test_values_that_are_no_tensors_run_nothing(tmp_path: Path, ran: Path) -> None:
    content = state()
    content["optimizer"]["name"] = Runs(ran)
    folder = written(tmp_path / "saved", content)
    with pytest.raises(CheckpointError, match=r"optimizer\.name holds more.*(posix|os|nt)\.mkdir.*weights_only=False"):
        loaded(folder)


def test_a_tensors_bytes_run_nothing(tmp_path: Path, ran: Path) -> None:
    folder = written(tmp_path / "saved")
    gadget, theirs = saved_with(tmp_path / "gadget", torch.ones(4), gadgets.by_reduce(ran)), index_of(folder)
    for key, info in theirs.storage_data.items():
        if key.fqn == "shapes.0":
            file = folder / info.relative_path
            info.offset, info.length = file.stat().st_size, gadget.stat().st_size
            file.write_bytes(file.read_bytes() + gadget.read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(theirs))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        loaded(folder)


def set_path(path: Any) -> Callable[[Path, Metadata], None]:
    def change(_: Path, index: Metadata) -> None:
        for info in index.storage_data.values():
            info.relative_path = path

    return change


def set_info(field: str, value: Any) -> Callable[[Path, Metadata], None]:
    def change(_: Path, index: Metadata) -> None:
        for info in index.storage_data.values():
            setattr(info, field, value)

    return change


def set_size(*dims: Any) -> Callable[[Path, Metadata], None]:
    def change(_: Path, index: Metadata) -> None:
        entry: Any = index.state_dict_metadata["shapes.0"]
        entry.size = torch.Size(dims)
        for chunk in entry.chunks:
            chunk.sizes = torch.Size(dims)

    return change


def set_chunks(make: Callable[[list[Any]], Any]) -> Callable[[Path, Metadata], None]:
    def change(_: Path, index: Metadata) -> None:
        entry: Any = index.state_dict_metadata["shapes.0"]
        entry.chunks = make(entry.chunks)

    return change


def share_chunks(_: Path, index: Metadata) -> None:
    """A few bytes in the file, and a million chunks in memory."""
    entry: Any = index.state_dict_metadata["shapes.2"]
    entry.chunks = entry.chunks * 1000
    for i in range(1000):
        index.state_dict_metadata[f"again.{i}"] = entry


def lose_stored(_: Path, index: Metadata) -> None:
    index.storage_data = {key: info for key, info in index.storage_data.items() if key.fqn != "shapes.0"}


def link_to_device(folder: Path, index: Metadata) -> None:
    (folder / "zero").symlink_to("/dev/zero")
    set_path("zero")(folder, index)


def make_pipe(folder: Path, index: Metadata) -> None:
    os.mkfifo(folder / "pipe")
    set_path("pipe")(folder, index)


def cyclic(_: Path, index: Metadata) -> None:
    entry: Any = index.state_dict_metadata["shapes.0"]
    entry.chunks.append(entry.chunks)


DAMAGES = {
    "outside": set_path("../outside.distcp"),
    "outside from within": set_path("a/../../outside.distcp"),
    "absolute": set_path("/etc/passwd"),
    "nul": set_path("__0_0.distcp\0"),
    "path of bytes": set_path(b"__0_0.distcp"),
    "no path": set_path(None),
    "missing": set_path("__9_9.distcp"),
    "folder": set_path("."),
    "device": link_to_device,
    "pipe": make_pipe,
    "offset past the end": set_info("offset", 1 << 40),
    "offset beyond 64 bits": set_info("offset", 1 << 70),
    "offset negative": set_info("offset", -1),
    "offset a bool": set_info("offset", True),
    "length past the end": set_info("length", 1 << 30),
    "length no number": set_info("length", 1e3),
    "length too short": set_info("length", 3),
    "compressed": set_info("transform_descriptors", ["stream.zstd/1"]),
    "huge": set_size(1 << 40),
    "huge product": set_size(*[1 << 40] * 10),
    "many dims": set_size(*[1] * 100),
    "chunk twice": set_chunks(lambda chunks: chunks * 2),
    "no chunks": set_chunks(lambda _: []),
    "chunks no list": set_chunks(lambda chunks: {0: chunks[0]}),
    "chunk no chunk": set_chunks(lambda _: [1]),
    "shared chunks": share_chunks,
    "cyclic": cyclic,
    "not stored": lose_stored,
}


def test_a_damaged_index_is_one_error(tmp_path: Path) -> None:
    folder = written(tmp_path / "saved")
    (tmp_path / "outside.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    whole = (folder / ".metadata").read_bytes()
    for damage, change in DAMAGES.items():
        theirs = pickle.loads(whole)
        change(folder, theirs)
        (folder / ".metadata").write_bytes(pickle.dumps(theirs))
        said = _error(loaded, folder)
        assert "saved is truncated or damaged: its .metadata" in said, f"{damage}: {said}"


def _error(read: Callable[[Path], object], path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    return str(caught.value)


DEEP, HUGE = 50_000, b"\x8a\x06" + (1 << 40).to_bytes(6, "little")
CONTENTS = {
    "empty": b"",
    "plain": pickle.dumps({"a": 1}),
    "deep tuples": b"\x80\x04)" + b"\x85" * DEEP + b".",
    "deep keys": b"\x80\x04})" + b"\x85" * 20 * DEEP + b"Ns.",  # `pickle` crashes
    "shared keys": b"\x80\x04}K\x01q\x00" + b"0h\x00h\x00\x86q\x00" * 60 + b"Ns.",  # `pickle` does not end
    "deep lists": b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "huge memo": b"\x80\x04Nr\xff\xff\xff\xff.",
    "huge frame": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f" + b"N.",
    "huge text": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fa.",
    "huge bytearray": b"\x80\x05" + call(name("builtins", "bytearray"), HUGE) + b".",
    "huge number": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "protocol 99": b"\x80\x63N.",
    "unknown opcode": b"\x80\x04\xff.",
    "no stop": b"\x80\x04N",
    "empty stack": b"\x80\x040.",
    "name of a class": b"\x80\x04" + name(gadgets.METADATA, "Metadata") + b".",
    "a name that is no text": b"\x80\x04K\x01K\x02\x93.",
    "text that is not UTF-8": b"\x80\x04\x8c\x02\xff\xfe.",
    "called twice": b"\x80\x04" + call(call(name("torch", "Size"), b")"), b")") + b".",
}  # fmt: skip


def test_a_pickle_that_is_no_index_is_one_error(tmp_path: Path) -> None:
    folder = written(tmp_path / "saved")
    for name_, content in CONTENTS.items():
        (folder / ".metadata").write_bytes(content)
        said = _error(loaded, folder)
        assert "saved is truncated or damaged" in said or "saved holds more than tensors" in said, f"{name_}: {said}"


FILES = {
    "tensor beyond its storage": call(
        name("torch._utils", "_rebuild_tensor_v2"),
        pickle.MARK + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x04t" + b"Q",
        b"K\x00", b"J\x00\x00\x00\x40\x85", b"K\x01\x85", b"\x89", call(name("collections", "OrderedDict")),
    ),
    "tensor of nothing": call(name("torch._utils", "_rebuild_tensor_v2"), *[b"N"] * 6),
    "parameter of nothing": call(name("torch._utils", "_rebuild_parameter"), *[b"N"] * 3),
    "sparse beyond itself": call(name("torch._utils", "_rebuild_sparse_tensor"), b"N", b"N"),
    "wrapper of nothing": call(name("torch._utils", "_rebuild_wrapper_subclass"), *[b"N"] * 8),
    "state of a class": name("torch", "Tensor") + b"}b",
    "unknown storage": pickle.MARK + text("module") + text("x") + b"tQ",
    "missing storage": pickle.MARK + text("storage") + name("torch", "FloatStorage") + text("9") + text("cpu")
    + b"K\x04tQ",
    "huge bytearray": call(name("__builtin__", "bytearray"), HUGE),
    "wrong opcode": b"\xff",
}  # fmt: skip


def test_a_damaged_file_is_one_error(tmp_path: Path) -> None:
    for name_, content in FILES.items():
        path = saved_with(tmp_path / "all.ckpt", {"a": torch.ones(4)}, content)
        assert "all.ckpt " in _error(check_file, path), name_


@pytest.mark.parametrize("old_format", [False, True])
def test_a_file_that_is_cut_short_or_changed_is_one_error(tmp_path: Path, old_format: bool) -> None:
    path, rng = tmp_path / "all.ckpt", random.Random(0)
    content = {"a": torch.ones(30, 4), "b": [0.1, "x"]} if old_format else state()  # it knows fewer dtypes
    torch.save(content, path, _use_new_zipfile_serialization=not old_format)
    check_file(path)
    whole = path.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"all\.ckpt "):
            check_file(path)
    for _ in range(30):
        changed = bytearray(whole)
        for _ in range(5):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            check_file(path)
        except CheckpointError:
            continue


def test_a_changed_index_is_one_error_or_loads_exactly(tmp_path: Path) -> None:
    folder, rng = written(tmp_path / "saved"), random.Random(150)
    whole, refused = (folder / ".metadata").read_bytes(), 0
    for _ in range(150):
        changed = bytearray(whole)
        for _ in range(rng.choice([1, 1, 1, 4])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        (folder / ".metadata").write_bytes(
            changed[: rng.choice([len(changed), len(changed), rng.randrange(len(changed))])]
        )
        try:
            found = loaded(folder)
        except CheckpointError:
            refused += 1
            continue
        assert same(found, state())
    assert 50 < refused < 150
