"""Run a step of the engine on tensors without storage, as one rank of many, and record what it does."""

from __future__ import annotations

import copy
import gc
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp.comm.packet import BUFFERS
from lightning_cp.comm.transfer import observing
from lightning_cp.compat.torch_names import fake_tensors, fake_world
from lightning_cp.config import ContextParallelConfig
from lightning_cp.device_profile import CPU, DeviceProfile, assuming
from lightning_cp.engine.apply import parallelize, remove_context_parallel
from lightning_cp.engine.paths import submodule
from lightning_cp.engine.recompute import checkpoint_blocks
from lightning_cp.mesh.groups import groups_for
from lightning_cp.nest import of_type, replace
from lightning_cp.pipelines.pipefusion.stages import blocks_of
from lightning_cp.planning.data_parallel import shard_weights, weights_mesh
from lightning_cp.planning.recorder import Recorder
from lightning_cp.planning.recording import TRAINING, StepSettings, record_step
from lightning_cp.planning.step import Layout, Step

_PLAIN = (bool, int, float, str, tuple, type(None))


def kind_of(block: nn.Module) -> Hashable:
    """Return what blocks have in common that do the same: classes, plain settings and the forms of weights."""
    modules = tuple(
        (name, type(inner), tuple(sorted((key, repr(x)) for key, x in vars(inner).items() if isinstance(x, _PLAIN))))
        for name, inner in block.named_modules()
    )
    weights = tuple((name, x.shape, x.dtype, x.requires_grad) for name, x in block.named_parameters())
    return modules, weights


@dataclass(frozen=True)
class Shortened:
    """What is left of a model's blocks.

    Attributes:
        repeats: how often each remaining block counts, in order.
        weights: module and name of each weight of the whole model, in order. The weights of a removed block are named
            as those of the block that counts for it.
    """

    repeats: dict[nn.Module, int]
    weights: list[tuple[nn.Module, str]]


def shorten(model: nn.Module, paths: Sequence[str], *, margin: int | None) -> Shortened:
    """Remove all but a few blocks of each row of equal ones from the model.

    Args:
        paths: paths of the blocks.
        margin: number of blocks to keep before and after the one that counts for all others. A block must not change
            what blocks do that are further away. None: no block is removed, nor where a block cannot count for another.
    """
    margin = len(paths) if margin is None or _differ(model, paths) else margin
    repeats: dict[nn.Module, int] = {}
    removed: dict[nn.Module, nn.Module] = {}  # modules of removed blocks -> those of the block that counts for them
    rows = groupby(paths, key=lambda path: (path.rpartition(".")[0], kind_of(submodule(model, path))))
    for (where, _), row in rows:
        blocks = [submodule(model, path) for path in row]
        is_list = isinstance(submodule(model, where), nn.ModuleList)
        if len(blocks) > 2 * margin + 1 and is_list:
            for block in blocks[margin + 1 : -margin]:
                removed |= zip(block.modules(), blocks[margin].modules(), strict=True)
            repeats |= dict.fromkeys(blocks[: margin + 1] + blocks[-margin:], 1)
            repeats[blocks[margin]] = len(blocks) - 2 * margin
        else:
            repeats |= dict.fromkeys(blocks, 1)
    weights = {x: (removed.get(m, m), name) for m in model.modules() for name, x in m.named_parameters(recurse=False)}
    for where in dict.fromkeys(path.rpartition(".")[0] for path in paths):
        parent, _, name = where.rpartition(".")
        blocks_left = [x for x in submodule(model, where).children() if x not in removed]
        if isinstance(submodule(model, where), nn.ModuleList):
            setattr(submodule(model, parent), name, nn.ModuleList(blocks_left))
    return Shortened(repeats, list(weights.values()))


def _differ(model: nn.Module, paths: Sequence[str]) -> bool:
    """Return True if equal blocks are not alike in the model: they share weights, or it has a module for each block."""
    blocks = [submodule(model, path) for path in paths]
    inside = {inner for block in blocks for inner in block.modules()}
    rows = {where: len(list(row)) for where, row in groupby(paths, key=lambda path: path.rpartition(".")[0])}
    counts, lists = {*rows.values(), len(paths)}, (x for x in model.modules() if isinstance(x, nn.ModuleList))
    of_each = (x for x in lists if len(x) in counts and x not in inside and inside.isdisjoint(x))
    shared = Counter(x for _, x in model.named_parameters(remove_duplicate=False))
    return any(True for _ in of_each) or any(shared[x] > 1 for block in blocks for x in block.parameters())


_PACKAGE = Path(__file__).parents[1]
ShortModels = dict[int | None, tuple[nn.Module, Shortened]]  # by the margin of `shorten`


class UntraceableError(ValueError):
    """A forward that cannot be run on tensors without storage, at any degrees."""


def dry_run(
    build: Callable[[], nn.Module],
    inputs: Mapping[str, Any],
    layout: Layout,
    settings: StepSettings = TRAINING,
    *,
    rank: int = 0,
    device: DeviceProfile = CPU,
    dtype: torch.dtype = torch.bfloat16,
    adapt: Callable[[nn.Module], object] | None = None,
    plan: object = None,
    kernel: str = "auto",
    mlp_tiles: int | str | None = None,
    every_block: bool = False,
    short_models: ShortModels | None = None,
) -> Step:
    """Trace one step of one rank without devices, other ranks, or memory for weights.

    Args:
        build: makes the model, for example `partial(FluxTransformer2DModel.from_config, config)`. It is called where
            tensors have no storage.
        inputs: arguments of the model's forward on this rank. Tensors on the meta device have no values; the model may
            read the values of others.
        layout: degrees.
        settings: what a step is.
        rank: the rank that is traced.
        device: the device to plan for.
        dtype: dtype of the weights.
        adapt: freezes weights of the model and adds what is trained instead, such as a LoRA; None: all are trained.
        plan, kernel, mlp_tiles: see `engine.apply.parallelize`.
        every_block: True: trace each block. False: of a row of equal ones the first, the last, and one for all others,
            unless the forward fails without the others, for example because it counts its blocks.
        short_models: kept from dry runs that differ in layout, rank or device only; they make this one faster.
    Raises:
        ValueError: the degrees do not fit the model, the class has no plan, or there is a process group.
        UntraceableError: the forward reads values that a tensor does not have, or fails with these inputs.
    """
    short_models = {} if short_models is None else short_models
    margin, is_short = None if every_block else 2 if layout.sharded else 1, False
    with fake_rank(layout.ranks, rank), assuming(device), new_garbage_only():
        config = ContextParallelConfig(
            ring_degree=layout.ring, ulysses_degree=layout.ulysses, rotate_method=layout.rotate_method
        )
        groups = groups_for(config)
        mesh = weights_mesh(groups, settings.task) if layout.sharded else None
        BUFFERS.forget()
        engine: dict[str, Any] = {"kernel": kernel, "check_peers": "off", "groups": groups}
        try:
            if margin not in short_models:
                whole = _on_meta(build, dtype, adapt, trains=settings.task == "train")
                short_models[margin] = whole, _shortened(whole, margin, config, plan, engine)
            model, blocks = copy.deepcopy(short_models[margin])
            is_short = any(count > 1 for count in blocks.repeats.values())
            checkpoint_blocks(model, layout.checkpointing)
            with fake_tensors(allow_real=True), observing(Recorder({})):
                replace_tensors(model, without_storage, without_storage)
                installed = parallelize(model, config, plan, mlp_tiles=mlp_tiles, **engine)
                if mesh is not None:
                    shard_weights(model, installed, mesh, settings.task)
                weights = [getattr(inner, name) for inner, name in blocks.weights]
                placed = replace(Tensor, lambda x: without_storage(x) if x.is_meta else x, dict(inputs))
                return record_step(model, placed, layout, groups, settings, weights=weights, repeats=blocks.repeats)
        except Exception as error:
            if "fake_tensor" in type(error).__module__ or ".numpy() is not supported" in str(error):
                raise UntraceableError(
                    f"this forward cannot be traced: it reads values of a tensor, or makes one of a size that depends "
                    f"on values{_where(error)} ({type(error).__name__}: {error}). If the tensor is an input, pass it "
                    "with its values, not on the meta device; otherwise choose the degrees by hand"
                ) from error
            if not is_short:
                kind = ValueError if isinstance(error, ValueError) else UntraceableError  # other degrees may avoid it
                if isinstance(error, ImportError) or (kind is ValueError and (is_ours(error) or not _where(error))):
                    raise
                text = f"this forward fails with these inputs{_where(error)}: {type(error).__name__}: {error}"
                raise kind(text) from error
        finally:
            BUFFERS.forget()
    same: Any = {"rank": rank, "device": device, "dtype": dtype, "adapt": adapt, "plan": plan, "kernel": kernel}
    return dry_run(build, inputs, layout, settings, mlp_tiles=mlp_tiles, every_block=True, **same)


def is_ours(error: Exception) -> bool:
    """Return True if an error was raised by this package: not by a model, nor by a library that either calls."""
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(_PACKAGE)


def _where(error: Exception) -> str:
    """Return the line of the model at which an error was raised, outside of torch and this package."""
    packages = [Path(torch.__file__).parent, _PACKAGE]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if not any(file.is_relative_to(x) for x in packages):
            return f", in {file.name}, line {frame.lineno}: {frame.line}"
    return ""


def _on_meta(
    build: Callable[[], nn.Module], dtype: torch.dtype, adapt: Callable[[nn.Module], object] | None, *, trains: bool
) -> nn.Module:
    """Build the model, with its adapters."""
    with torch.device("meta"):
        model: Any = build()
    replace_tensors(model, lambda x: x.to(dtype) if x.is_floating_point() else x, lambda x: x)
    if not trains:
        return model.eval()  # type: ignore[no-any-return]
    model.train()
    if adapt is not None:
        adapt(model)
    return model  # type: ignore[no-any-return]


def _shortened(
    model: nn.Module, margin: int | None, config: ContextParallelConfig, plan: object, engine: Mapping[str, Any]
) -> Shortened:
    """Remove blocks that are equal to others from the model, on tensors without storage."""
    with fake_tensors(allow_real=True), observing(Recorder({})):
        paths = blocks_of(parallelize(model, config, plan, **engine))
        remove_context_parallel(model)
    return shorten(model, paths, margin=margin)


def without_storage(x: Tensor) -> Tensor:
    """Return a tensor of the same form on the device of the dry run. Call it where tensors have no storage."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def replace_tensors(
    model: nn.Module, of_weight: Callable[[Tensor], Tensor], of_buffer: Callable[[Tensor], Tensor]
) -> None:
    """Replace the weights and buffers of a model. Tied weights stay tied."""
    new: dict[Tensor, nn.Parameter] = {}
    for inner in model.modules():
        for name, x in inner._parameters.items():
            if x is not None:
                if x not in new:
                    new[x] = nn.Parameter(of_weight(x.detach()), x.requires_grad)
                inner._parameters[name] = new[x]
        for name, buffer in inner._buffers.items():
            inner._buffers[name] = None if buffer is None else of_buffer(buffer)
        for name, value in list(vars(inner).items()):  # tables that are no buffers
            if isinstance(value, (Tensor, list, tuple)) and any(True for _ in of_type(Tensor, value)):
                setattr(inner, name, replace(Tensor, of_buffer, value))


@contextmanager
def new_garbage_only() -> Iterator[None]:
    """Leave objects that exist already out of garbage collections, which take a second each with all of them."""
    if gc.get_freeze_count():
        yield  # others have frozen objects, which would be unfrozen
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def fake_rank(ranks: int, rank: int) -> Iterator[None]:
    """Be one rank of a default process group that sends nothing. Raises: ValueError: there is a process group."""
    if dist.is_initialized():
        raise ValueError("a dry run makes a process group of its own: run it before init_process_group")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} must be at least 0 and below the number of ranks, {ranks}")
    with fake_world(ranks, rank):
        yield
