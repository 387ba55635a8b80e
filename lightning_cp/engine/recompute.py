"""Kinds of activation checkpointing: inputs of blocks in host memory; attention and collectives kept for backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lightning_cp.attention.operator
import lightning_cp.comm.halo
import lightning_cp.comm.shards  # noqa: F401 - they register the operators that are saved
from lightning_cp.comm.background import SideStream
from lightning_cp.compat.compiler import compile_blocks_whole
from lightning_cp.compat.torch_names import address_of, is_traceable_wrapper_subclass

_MIN_BYTES = 1 << 20
_OPERATORS = ("attention", "gather", "sum_over_ranks", "halo_exchange")
save_attention = partial(
    create_selective_checkpoint_contexts, [getattr(torch.ops.lightning_cp, name).default for name in _OPERATORS]
)
"""A `context_fn` for `torch.utils.checkpoint.checkpoint` in code of your own."""


class OffloadCheckpoint:
    """Call a block with activation checkpointing, and keep its inputs in host memory until its backward.

    While the block runs, its inputs are copied to pinned host memory. While the backward of a block runs, the inputs of
    the block before it are copied back. Both copies run on a separate stream. For any diffusers transformer:

        transformer.enable_gradient_checkpointing(gradient_checkpointing_func=OffloadCheckpoint())

    Weights, tensors inside of other arguments, and tensors that the block before got too stay on the device. Blocks may
    be compiled one by one. Use an object for each model.

    Args: min_bytes: smaller inputs stay on the device.
    """

    def __init__(self, min_bytes: int = _MIN_BYTES) -> None:
        self._min_bytes = min_bytes
        self._given: list[weakref.ref[Tensor]] = []  # tensors that the last block got
        self._last: Callable[[], _Inputs | None] = lambda: None  # its inputs, while its backward may need them
        self._sides: dict[torch.device, SideStream] = {}

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block. Returns: result of `function`.

        Raises: RuntimeError: it has changed an input in place. ValueError: the call itself is compiled.
        """
        if torch.compiler.is_compiling():
            raise ValueError(
                "inputs cannot leave the device inside of a compiled model: compile its blocks one by one with "
                "compile_repeated_blocks(), or use another kind of activation checkpointing"
            )
        names, count = tuple(kwargs), len(args)

        def call(*values: Any) -> Any:
            return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

        given = (*args, *kwargs.values())
        inputs = _Inputs(self._choose(given), self._last, self._side)
        self._last = weakref.ref(inputs)
        try:
            with saved_tensors_hooks(inputs.pack, inputs.unpack):  # only for the inputs: the block has hooks of its own
                return checkpoint(call, *given, use_reentrant=False)
        finally:
            inputs.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return OffloadCheckpoint, (self._min_bytes,)  # a copied model has inputs and a stream of its own

    def _choose(self, given: tuple[Any, ...]) -> set[int]:
        """Return the addresses of the storages to copy. Tensors that several blocks get are copied at most once."""
        found = [x for x in given if isinstance(x, Tensor)]
        before, self._given = self._given, [weakref.ref(x) for x in found]
        return {
            address_of(x.untyped_storage())
            for x in found
            if x.nbytes >= self._min_bytes
            and not isinstance(x, nn.Parameter)
            and not is_traceable_wrapper_subclass(x)
            and not any(one() is x for one in before)
        }

    def _side(self, device: torch.device) -> SideStream:
        if device not in self._sides:
            self._sides[device] = SideStream(device)
        return self._sides[device]


class _Inputs:
    """Inputs of one checkpointed block in host memory. Freed with the block's part of the graph.

    Args:
        addresses: addresses of the storages to copy.
        before: returns the inputs of the block before.
        side: makes streams.
    """

    def __init__(
        self, addresses: set[int], before: Callable[[], _Inputs | None], side: Callable[[torch.device], SideStream]
    ) -> None:
        self._addresses, self._before, self._make_side = addresses, before, side
        self._side: SideStream | None = None
        self._leaving: list[tuple[Tensor, int]] = []  # on the device, with version, until `release`
        self._host: list[tuple[Tensor, torch.device]] = []
        self._back: dict[int, Tensor] = {}  # on the device again, by index
        self._event: Any = None  # after copies that the current stream has not waited for

    def pack(self, x: Tensor) -> Any:
        """Start to copy an input to the host. Returns: its index, or the input if it stays."""
        if address_of(x.untyped_storage()) not in self._addresses:
            return x
        is_dense = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) == x.numel()
        order = x if is_dense else torch.empty(x.shape, device="meta")  # without gaps
        pins = x.device.type == "cuda"
        host = torch.empty_strided(x.shape, order.stride(), dtype=x.dtype, device="cpu", pin_memory=pins)
        self._side = self._make_side(x.device)
        self._side.follow()
        self._side.copy(host, x)
        self._event = self._side.record()
        self._leaving.append((x, x._version))
        self._host.append((host, x.device))
        return len(self._host) - 1

    def release(self) -> None:
        """Free the inputs on the device, once they are copied. Raises: RuntimeError: one was changed in place."""
        leaving, self._leaving = self._leaving, []
        self._wait()
        if any(x._version != version for x, version in leaving):
            raise RuntimeError(
                "a block changes an input in place, so that backward cannot compute it again: use a block that does "
                "not, or no activation checkpointing"
            )

    def unpack(self, packed: Any) -> Tensor:
        """Return an input on the device, and start to copy those of the block before."""
        if isinstance(packed, Tensor):
            return packed
        self.bring()
        self._wait()
        before = self._before()
        if before is not None:
            before.bring()
        return self._back.pop(packed)

    def bring(self) -> None:
        """Start to copy the inputs to the device, unless they are there."""
        if self._back or self._side is None:
            return
        targets = [
            torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
            for host, device in self._host
        ]
        self._side.follow()
        for i, (target, (host, _)) in enumerate(zip(targets, self._host, strict=True)):
            self._back[i] = self._side.copy(target, host)
        self._event = self._side.record()

    def _wait(self) -> None:
        event, self._event = self._event, None
        if self._side is not None:
            self._side.wait(event)

    def __del__(self) -> None:
        self._wait()  # before other kernels get the memory of copies that nothing has used


def selective_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block with activation checkpointing; backward recomputes all but its attention and collectives.

    Each attention keeps the tensors that its backward needs: output and LSE, with Ulysses also the exchanged queries,
    keys and values. For any diffusers transformer:

        transformer.enable_gradient_checkpointing(gradient_checkpointing_func=selective_checkpoint)

    Blocks may be compiled one by one; see `compiler.compile_blocks_whole`.

    Returns: result of `function`.
    """
    compile_blocks_whole()
    return checkpoint(function, *args, use_reentrant=False, context_fn=save_attention, **kwargs)


def checkpoint_blocks(model: Any, kind: str) -> None:
    """Enable a kind of activation checkpointing of a diffusers model: none, full, selective or offload."""
    functions: dict[str, Callable[[], Any]] = {
        "full": lambda: None,  # diffusers' own
        "selective": lambda: selective_checkpoint,
        "offload": OffloadCheckpoint,
    }
    if kind != "none":
        model.enable_gradient_checkpointing(gradient_checkpointing_func=functions[kind]())
