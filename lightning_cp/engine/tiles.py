"""Compute feed-forwards, which treat each token alone, in tiles of tokens: find them, and replace their forward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cp.comm.transforms import transforms_are_on
from lightning_cp.config import AUTO_TILES
from lightning_cp.engine.forwards import ForwardWrapper, own_forward
from lightning_cp.engine.model_plan import ModelPlan
from lightning_cp.engine.paths import class_of, submodule, unwrapped
from lightning_cp.errors import PlanError
from lightning_cp.rules import MLP_TILES

# At the end of a class's name, or a base's: layers that compute each token alone.
_PER_TOKEN = ("Linear", "LayerNorm", "RMSNorm", "Identity", "Dropout", "SiLU")
_NO_GRAPH = "mlp_tiles computes feed-forwards outside of graphs: leave out mlp_tiles, or fullgraph=True"


def check_tiles(tiles: object) -> None:
    """Check the setting `mlp_tiles`. Raises: ValueError: it is invalid."""
    if not MLP_TILES.passes(tiles):
        raise ValueError(f"mlp_tiles={tiles!r} must be {MLP_TILES.describe().replace('null', 'None')}")


def tile_feed_forwards(model: nn.Module, model_plan: ModelPlan, tiles: int | str) -> None:
    """Compute the feed-forwards of a model's blocks in tiles. Raises: PlanError: there are none."""
    found = feed_forwards(model, model_plan)
    if not found:
        raise PlanError(
            f"mlp_tiles={tiles!r}: {class_of(model).__name__} has no feed-forward that is a module of its own and "
            "computes each token alone: leave out mlp_tiles, or name your own modules in Plan(feed_forwards=...)"
        )
    for module in dict.fromkeys(found.values()):
        tile(module, math.ceil(width_ratio(module)) if tiles == AUTO_TILES else int(tiles))


def feed_forwards(model: nn.Module, model_plan: ModelPlan) -> dict[str, nn.Module]:
    """Find the feed-forwards in a model's blocks that compute each token alone, by path.

    These are modules of diffusers that take one tensor and have only linear layers (at least two, one of which returns
    the width of the input), activations, norms over the last dim and dropout. A block that computes its
    feed-forward in its own forward, or with its attention, has none. Further ones are named by the plan.

    Raises: PlanError: a module that the plan names has layers that do not compute each token alone.
    """
    attending = {submodule(model, path) for path in model_plan.attention}
    found: dict[str, nn.Module] = {}
    for block_path in sorted(model_plan.blocks):
        block = submodule(model, block_path)
        for name in model_plan.feed_forwards:
            module = submodule(block, name)
            if other := next((x for x in _leaves(module) if not _is_per_token(x)), None):
                raise PlanError(
                    f"feed_forwards={name!r} of the plan: {block_path}.{name} ({class_of(module).__name__}) has a "
                    f"{class_of(other).__name__}, which may mix tokens. Name only modules of linear layers, "
                    "activations, norms over the last dim and dropout"
                )
            found[f"{block_path}.{name}"] = module
        found |= {f"{block_path}.{name}": module for name, module in _in_block(block, attending)}
    return found


def width_ratio(module: nn.Module) -> float:
    """Return the width of a feed-forward's widest layer divided by that of its input."""
    widths = _widths(module)
    return max(width for pair in widths for width in pair) / widths[0][0] if widths else 1.0


def _in_block(module: nn.Module, attending: set[nn.Module], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        child = unwrapped(child)
        if child in attending:
            continue
        if _is_feed_forward(child):
            yield path + name, child
        else:
            yield from _in_block(child, attending, f"{path}{name}.")


def _is_feed_forward(module: nn.Module) -> bool:
    kind = class_of(module)
    if not kind.__module__.startswith("diffusers.") or not module._modules or not _takes_one_tensor(kind):
        return False
    widths = _widths(module)
    if len(widths) < 2 or all(out != widths[0][0] for _, out in widths):
        return False
    return all(map(_is_per_token, _leaves(module)))


def _takes_one_tensor(kind: type[nn.Module]) -> bool:
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    required = [x for x in parameters if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    return len(required) == 1 == len([x for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD])


def _widths(module: nn.Module) -> list[tuple[int, int]]:
    """List (in, out) of a module's linear layers, without those of adapters."""
    layers = [module, *_below(module)]
    return [(int(x.in_features), int(x.out_features)) for x in layers if hasattr(x, "in_features")]  # type: ignore[arg-type]


def _below(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside a module; of an adapter around a layer only the layer."""
    for child in module.children():
        base = getattr(child, "base_layer", None)
        inner = base if isinstance(base, nn.Module) else child
        yield inner
        yield from _below(inner)


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that have no others inside, and those with parameters of their own."""
    for inner in [module, *_below(module)]:
        if not any(True for _ in inner.children()) or inner._parameters:
            yield inner


def _is_per_token(module: nn.Module) -> bool:
    if own_forward(module).get() is not None and not isinstance(module, nn.Linear):
        return False
    kinds = class_of(module).__mro__
    is_activation = any(kind.__module__ == nn.ReLU.__module__ for kind in kinds)
    is_activation = is_activation and not isinstance(module, nn.MultiheadAttention)
    is_norm = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) > 1
    return not is_norm and (is_activation or any(kind.__name__.endswith(_PER_TOKEN) for kind in kinds))


class TiledForward(ForwardWrapper):
    """The forward of a feed-forward in tiles of its input's longest dim, without the last.

    The values between its layers exist for one tile at a time: each tile has an activation checkpoint.

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
        forward = partial(checkpoint, self.forward, use_reentrant=False) if torch.is_grad_enabled() else self.forward
        return torch.cat([forward(tile) for tile in x.split(math.ceil(x.shape[dim] / self.tiles), dim)], dim)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute all tokens in one piece."""
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


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
