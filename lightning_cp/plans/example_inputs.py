"""Example inputs of every class of diffusers with a plan, as data; ControlNets have those of the model they steer.

A value is a text, or a list, tuple or dict of texts; other values are taken as they are. A text has a kind and its
dims. A dim is an expression of sizes and of entries of the model's configuration. The caller draws these tensors:

    float, step, time            noise, times of a scheduler, times between 0 and 1
    mask, int_mask, float_mask   1 for tokens that are no padding, as bool, integers or floats
    lengths samples tokens       the number of those of each sample
    ones, flags, turns           weights, booleans, complex rotations
    below n dims                 indices below n

These have values: `range a b`; `runs x n y m` (x n times, then y m times); `number n`; `shape a b` (a tuple);
`list n <text>` (n values); `stack n <text>` (n times the same tensor, stacked).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Draw = Callable[[str, list[int]], Tensor]  # kind and dims -> tensor


@dataclass(frozen=True)
class ExampleInputs:
    """The arguments of a class's forward.

    Attributes:
        inputs: for each argument its value, see above.
        only_if: entry of the configuration without which an argument is left out.
        space, time: pixels and frames of a latent.
        patch: latents of a token, in height and in width, or the entry of the configuration with it.
        sizes: more sizes, with those of released models.
    """

    inputs: Mapping[str, Any]
    only_if: Mapping[str, str] = field(default_factory=dict)
    space: int = 8
    time: int = 4
    patch: int | str = "patch_size"
    sizes: Mapping[str, int] = field(default_factory=dict)

    def patches(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """Return the latents of a token: along frames, and along height and width."""
        configured = config.get(self.patch, 1) if isinstance(self.patch, str) else self.patch
        time, *_, patch = configured if isinstance(configured, (list, tuple)) else (1, configured)
        return config.get("patch_size_t") or time, patch

    def has(self, *sizes: str) -> bool:
        """Return True if an argument depends on one of these sizes."""
        return any(size in str(self.inputs) for size in sizes)

    def sized(self, config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the values of all names in dims.

        Args: sizes: batch, text (tokens), audio (tokens), and frames, height and width in latents; others are added.
        """
        time, patch = self.patches(config)
        times, rows, columns = (-(-sizes[x] // y) for x, y in (("frames", time), ("height", patch), ("width", patch)))
        tokens = times * rows * columns if self.has("height", "tokens") else sizes["audio"]
        grid = {"times": times, "rows": rows, "columns": columns, "tokens": tokens}
        return {**config, **self.sizes, **grid, **sizes}

    def make(self, values: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
        """Return the arguments. Args: values: see `sized`."""
        given = {x: y for x, y in self.inputs.items() if x not in self.only_if or values.get(self.only_if[x])}
        return {name: _made(value, values, draw) for name, value in given.items()}


def _made(value: Any, values: Mapping[str, Any], draw: Draw) -> Any:
    if isinstance(value, Mapping):
        return {name: _made(x, values, draw) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_made(x, values, draw) for x in value)
    if not isinstance(value, str):
        return value
    kind, *dims = value.split()
    if kind in ("list", "stack"):
        count = eval(dims[0], None, dict(values))
        made = [_made(" ".join(dims[1:]), values, draw) for _ in range(count)]
        return made if kind == "list" else torch.stack(made)
    numbers: list[Any] = [eval(x, None, dict(values)) for x in dims]  # of this table, never of a user
    match kind:
        case "number":
            return numbers[0]
        case "shape":
            return tuple(numbers)
        case "range":
            return torch.arange(*numbers)
        case "runs":
            return torch.tensor([x for x, n in zip(numbers[::2], numbers[1::2]) for _ in range(n)])
    return draw(kind, numbers)
