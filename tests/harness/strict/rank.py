"""What a strict run changes in a rank: the backend of the default group, batches, and where backward runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightning_cp.mesh import groups as mesh
from lightning_cp.mesh import sample_groups
from tests.harness.strict.group import StrictGroup, links
from tests.harness.strict.link import Link
from tests.harness.strict.messages import Strict


@contextmanager
def strict_rank(address: str, rank: int, strict: Strict) -> Iterator[None]:
    """Context in which the process groups of this rank are strict, except those made with backend="gloo" explicitly."""
    links.append(Link(address, rank, strict))
    error = True
    try:
        with ExitStack() as stack:
            for patch in _patches(strict):
                stack.enter_context(patch)
            yield
        error = False
    finally:
        links.pop().close(error=error)


def _patches(strict: Strict) -> list[Any]:
    init, batch, connect = dist.init_process_group, dist.batch_isend_irecv, mesh.connect

    def init_strict(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init("strict" if backend in (None, "gloo") else backend, *args, **kwargs)

    def batch_strict(ops: list[Any]) -> list[dist.Work]:
        group = ops[0].group or dist.group.WORLD
        if not isinstance(group, StrictGroup):
            return batch(ops)
        return [group.batch([(op.op is dist.isend, op.group_peer, op.tensor) for op in ops])]

    def connect_strict(*groups: Any) -> None:
        connect(*groups)
        for group in dict.fromkeys(groups):
            if isinstance(group, StrictGroup):
                dist.all_reduce(torch.zeros(1), group=group)

    patches = [
        mock.patch.object(dist, "init_process_group", init_strict),
        mock.patch.object(dist, "batch_isend_irecv", batch_strict),
        mock.patch.object(mesh, "connect", connect_strict),
        mock.patch.object(sample_groups, "connect", connect_strict),
    ]
    if strict.backward_thread:
        patches.append(mock.patch.object(torch.autograd, "_engine_run_backward", _in_a_thread))
    return patches


def _in_a_thread(*args: Any, **kwargs: Any) -> Any:
    """Run backward in a thread of its own, unless this is one. Its state is that of a new thread."""
    run = torch.autograd.graph._engine_run_backward
    if threading.current_thread().name == "backward":
        return run(*args, **kwargs)
    found: list[Any] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            found.append(run(*args, **kwargs))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, name="backward")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]
