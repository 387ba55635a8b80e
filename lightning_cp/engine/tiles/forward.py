"""Compute a module that treats each token alone in tiles of tokens, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_cp.comm.transforms import transforms_are_on
from lightning_cp.engine.attention.replay import in_scope
from lightning_cp.engine.forwards import ForwardWrapper, has_dropout, own_forward

_NO_GRAPH = "mlp_tiles computes feed-forwards outside of graphs: leave out mlp_tiles, or fullgraph=True"


class TiledForward(ForwardWrapper):
    """The forward of a feed-forward in tiles of its input's longest dim, without the last.

    The values between its layers exist for one tile at a time. Backward computes them again, tile by tile.

    Attributes: module: the feed-forward. tiles: number of tiles.
    """

    def __init__(self, module: nn.Module, tiles: int) -> None:
        self.module, self.tiles = module, tiles
        self.original = own_forward(module).get()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the forward of one tensor. With more arguments, and for derivatives of `torch.func`, in one piece."""
        x, *others = (*args, *kwargs.values())
        if others or x.ndim < 2 or not x.numel() or transforms_are_on():
            return self.forward(*args, **kwargs)
        dim = max(range(x.ndim - 1), key=lambda i: x.shape[i])
        tiles = _Tiles(self.forward, dim, math.ceil(x.shape[dim] / self.tiles))
        if not torch.is_grad_enabled():
            return tiles.outputs(x)
        trained = list(dict.fromkeys(p for p in self.module.parameters() if p.requires_grad))
        if not trained and not x.requires_grad:
            return tiles.outputs(x)
        return _TiledFunction.apply(self.module, tiles, trained, x, *trained)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute all tokens in one piece."""
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


@dataclass(frozen=True)
class _Tiles:
    """A function and the tiles of its argument: `size` tokens of `dim`; the last tile may be smaller."""

    function: Callable[[Tensor], Tensor]
    dim: int
    size: int

    def of(self, x: Tensor) -> Iterator[Tensor]:
        """Yield views of the tiles of a tensor."""
        for start in range(0, x.shape[self.dim], self.size):
            yield x.narrow(self.dim, start, min(self.size, x.shape[self.dim] - start))

    def outputs(self, x: Tensor) -> Tensor:
        """Compute one tile after another into one tensor."""
        outputs: Iterator[Tensor] = iter(())
        for i, tile in enumerate(self.of(x)):
            y = self.function(tile)
            if i == 0:
                whole = y.new_empty((*x.shape[:-1], y.shape[-1]))
                outputs = self.of(whole)
            next(outputs).copy_(y)
            del y
        return whole


class _TiledFunction(torch.autograd.Function):
    """Forward: no intermediate value is kept. Backward: compute and differentiate one tile after another.

    Gradients of parameters are summed here and returned once, so hooks of parameters, DDP and FSDP2 get one gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, module: nn.Module, tiles: _Tiles, trained: Sequence[nn.Parameter], *tensors: Tensor
    ) -> Tensor:
        x = tensors[0]
        ctx.module, ctx.trained, ctx.versions = module, trained, [p._version for p in trained]
        # Dropout and its checks need the scope of the block, in backward too.
        ctx.tiles = tiles = _Tiles(in_scope(tiles.function), tiles.dim, tiles.size)
        ctx.surroundings = _surroundings(module, x.device)
        ctx.save_for_backward(x)
        with _aliases(module, trained):
            return tiles.outputs(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        trained: list[nn.Parameter] = ctx.trained
        _check_unchanged(ctx.module, trained, ctx.versions)
        needs_x = ctx.needs_input_grad[3]
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        sums: list[Tensor | None] = [None] * len(trained)
        with ctx.surroundings(), _aliases(ctx.module, trained) as aliases:
            into = ctx.tiles.of(grad_x) if grad_x is not None else None
            for tile, grad_tile in zip(ctx.tiles.of(x), ctx.tiles.of(grad), strict=True):
                tile = tile.detach().requires_grad_(needs_x)
                with torch.enable_grad():
                    y = ctx.tiles.function(tile)
                inputs = [tile, *aliases] if needs_x else aliases
                grads: list[Tensor | None] = list(torch.autograd.grad(y, inputs, grad_tile, allow_unused=True))
                del y
                if into is not None:
                    grad_of_tile = grads.pop(0)
                    assert grad_of_tile is not None, "the output depends on each token"
                    next(into).copy_(grad_of_tile)
                _add(sums, grads)
        grads_of = [None if s is None else s.to(p.dtype) for s, p in zip(sums, trained, strict=True)]
        return None, None, None, grad_x, *grads_of


def _add(sums: list[Tensor | None], grads: list[Tensor | None]) -> None:
    """Add gradients of one tile to the sums: those of float16 and bfloat16 in float32, against rounding."""
    for i, grad in enumerate(grads):
        if grad is None:
            continue
        before = sums[i]
        if before is None:
            sums[i] = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
        else:
            before += grad
        grads[i] = None


def _check_unchanged(module: nn.Module, trained: list[nn.Parameter], versions: list[int]) -> None:
    now = {id(p) for p in module.parameters()}
    if any(id(p) not in now for p in trained) or [p._version for p in trained] != versions:
        raise RuntimeError(
            f"parameters of a {type(module).__name__} were changed between forward and backward, and mlp_tiles "
            "computes its forward again in backward: change them after backward"
        )


@contextmanager
def _aliases(module: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Replace trained parameters by leaf tensors with the same memory, which have no hooks; yield these."""
    leaves = {id(p): p.detach().requires_grad_() for p in trained}
    places = [(inner._parameters, name, p) for inner in module.modules() for name, p in inner._parameters.items()]
    places = [place for place in places if id(place[2]) in leaves]
    try:
        for holder, name, p in places:
            holder[name] = leaves[id(p)]  # type: ignore[assignment]
        yield list(leaves.values())
    finally:
        for holder, name, p in places:
            holder[name] = p


def _surroundings(module: nn.Module, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a context that restores what the forward depends on: autocast, and random states if there is dropout."""
    kind = device.type
    autocast = partial(
        torch.autocast,
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
    states = None
    if has_dropout(module):
        states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if kind == "cuda" else None

    @contextmanager
    def surroundings() -> Iterator[None]:
        with ExitStack() as stack:
            if states is not None:
                stack.enter_context(torch.random.fork_rng([device] if kind == "cuda" else []))
                torch.set_rng_state(states[0])
                if states[1] is not None:
                    torch.cuda.set_rng_state(states[1], device)
            stack.enter_context(autocast())
            yield

    return surroundings


def tile(module: nn.Module, tiles: int) -> None:
    """Compute a feed-forward in tiles. `untile` restores it."""
    own_forward(module).put(partial(_runner(), TiledForward(module, tiles)))


def untile(module: nn.Module) -> None:
    """Undo `tile`, also on a deep copy. Other modules stay unchanged."""
    tiled = own_forward(module).holder
    if not isinstance(tiled, TiledForward):
        return
    slot = own_forward(module, above=tiled)
    if tiled.original is not None:
        slot.put(tiled.original)
    else:
        slot.clear(module)


@cache
def _runner() -> Callable[..., Any]:
    """Return `_run`, which dynamo does not trace. The first call imports dynamo."""
    function: Callable[..., Any] = torch.compiler.disable(_run, reason=_NO_GRAPH)  # type: ignore[no-untyped-call]
    return function


def _run(tiled: TiledForward, *args: Any, **kwargs: Any) -> Any:
    return tiled.run(*args, **kwargs)
