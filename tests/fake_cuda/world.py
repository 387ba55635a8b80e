"""CUDA tensors without a device: fake tensors, a fake process group, and a record of what the host waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_cp.attention import merge as merging
from lightning_cp.comm import transfer
from lightning_cp.compat.torch_names import fake_world
from lightning_cp.kernels import PartialAttention

WORLD, RANK = 4, 1


@contextmanager
def fake_ranks() -> Iterator[None]:
    """Rank 1 of a process group of 4 with collectives that send nothing."""
    with fake_world(WORLD, RANK):
        yield


class CrossingRecorder(TorchDispatchMode):
    """Run operators on fake CUDA tensors and real CPU tensors, and record which of them involve both devices.

    The bodies of our custom operators run, not their fakes.

    Attributes:
        crossings: operators that read tensors of one device and write, or also read, another.
        waits: those for which the host waits for the GPU: all but copies between the GPU and pinned memory with
            `non_blocking`. Operators that need the value of a CUDA tensor (`.item()`, `nonzero`) raise an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[str] = []
        self.waits: list[str] = []
        self._pinned: dict[int, Tensor] = {}  # by address; kept alive, so that no other tensor gets the address

    def clear(self) -> None:
        """Forget what was recorded."""
        self.crossings, self.waits = [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "lightning_cp":
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if func is torch.ops.aten.is_pinned.default:
            return self._is_pinned(args[0])
        pins = bool(kwargs.pop("pin_memory", False))
        given = _tensors((args, kwargs))
        on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu" and not any(map(is_fake, given))
        if on_host:
            with _disable_current_modes():
                result = args[0].clone() if func is torch.ops.aten._pin_memory.default else func(*args, **kwargs)
                if pins or func is torch.ops.aten._pin_memory.default:
                    self._pinned[result.data_ptr()] = result
            return result
        result = func(*args, **kwargs)
        non_blocking = args[2:3] == (True,) if func is torch.ops.aten.copy_.default else kwargs.get("non_blocking")
        self._record(func, given, result, bool(non_blocking))
        return result

    def _record(self, func: Any, given: list[Tensor], result: Any, non_blocking: bool) -> None:
        is_copy = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        found = given if func is torch.ops.aten.copy_.default else [*given, *_tensors(result)]
        # 0-dim CPU tensors are legal arguments of CUDA operators, and are passed to the kernel without a copy.
        if len({x.device.type for x in found if x.ndim}) > 1:
            self.crossings.append(str(func))
        elif not is_copy or len({x.device.type for x in found}) == 1:
            return
        on_host = [x for x in found if x.device.type == "cpu"]
        if not (is_copy and non_blocking and all(map(self._is_pinned, on_host))):
            self.waits.append(str(func))

    def _is_pinned(self, x: Tensor) -> bool:
        return not is_fake(x) and x.device.type == "cpu" and x.untyped_storage().data_ptr() in self._pinned


def _tensors(nest: Any) -> list[Tensor]:
    return [x for x in tree_leaves(nest) if isinstance(x, Tensor)]


def _merge_in_place(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Check what the Triton kernel requires of its arguments; a launch needs a device."""
    assert a.out.dtype == a.lse.dtype == b.lse.dtype == torch.float32
    assert {x.device.type for x in (*a, *b)} == {"cuda"}
    return a


def run_backward(loss: Tensor) -> None:
    """Run the nodes of a backward pass one by one: autograd's engine needs a device for CUDA tensors."""
    first: Any = loss.grad_fn
    waits_for, seen, found = Counter[Any](), {first}, [first]
    for node in found:
        for following, _ in node.next_functions:
            waits_for[following] += 1
            if following is not None and following not in seen:
                seen.add(following)
                found.append(following)
    received: dict[Any, list[Tensor | None]] = {node: [None] * len(node._input_metadata) for node in found}
    received[first] = [torch.ones_like(loss)]
    ready = [first]
    while ready:
        node = ready.pop()
        with torch.no_grad():
            results = getattr(node, "apply", node)(*received.pop(node))
        results = results if isinstance(results, tuple) else (results,)
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        needed = getattr(node, "needs_input_grad", [edge[0] is not None for edge in node.next_functions])
        gradients = [gradient for gradient, is_needed in zip(results, needed, strict=False) if is_needed]
        for (following, index), gradient in zip(edges, gradients, strict=True):
            if gradient is not None:
                form = following._input_metadata[index]
                if tuple(gradient.shape) != tuple(form.shape):  # the engine adds up what was broadcast
                    gradient = gradient.sum_to_size(form.shape)
                gradient = gradient.to(form.dtype)
                before = received[following][index]
                received[following][index] = gradient if before is None else before + gradient
            waits_for[following] -= 1
            if not waits_for[following]:
                ready.append(following)


@contextmanager
def fake_cuda() -> Iterator[CrossingRecorder]:
    """Context with fake CUDA tensors on an H100 and with NCCL. `.item()` and similar calls raise an error."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.backends.cudnn, "is_available", return_value=True),
        mock.patch.object(transfer, "cuda_backend_is", lambda backend, group: backend == "nccl"),
        mock.patch.object(merging, "_has_triton", return_value=True),
        mock.patch.dict(
            "sys.modules", {"lightning_cp.attention.merge_triton": mock.Mock(merge_in_place=_merge_in_place)}
        ),
        CrossingRecorder() as recorder,
    ):
        yield recorder
