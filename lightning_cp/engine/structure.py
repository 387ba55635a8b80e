"""Check that a parallel model still consists of the objects that the plan was installed on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_cp.engine.forwards import decorated_function, own_forward
from lightning_cp.engine.paths import submodule, unwrapped
from lightning_cp.engine.rules import Rules


class Structure:
    """The planned modules of a model, their processors and forwards, by identity.

    `_entries` is compared before each forward, so it holds raw attributes (12 µs for the 57 blocks of Flux); it also
    changes if a wrapper is put around a module or its forward. `_parts` leaves wrappers out; if it changes, the plan
    must be installed again.
    """

    def __init__(self, model: nn.Module, rules: Rules) -> None:
        self._entries: list[tuple[dict[str, Any], str, object]] = []  # attributes of an object, name, value
        self._counts: list[tuple[dict[str, Any], int]] = []  # children of a module, their number
        self._parts: list[object] = []
        blocks = {path for rule in rules.arguments if rule.is_block for path in rule.paths}
        for path in sorted({*blocks, *rules.attention, *_other_paths(rules)} - {""}):
            self._add_path(model, path)
        for path in sorted({*blocks, *rules.attention} - {""}):
            self._add_forward(submodule(model, path))
        for path in rules.attention:
            self._add_processor(submodule(model, path))
        self._entries = list({(id(x), name): (x, name, value) for x, name, value in self._entries}.values())
        self._counts = list({id(x): (x, n) for x, n in self._counts}.values())

    def holds(self) -> bool:
        """Return True if all entries are unchanged. torch.compile can trace this, and then guards on it."""
        for attributes, name, value in self._entries:
            if attributes.get(name) is not value:
                return False
        for children, count in self._counts:  # noqa: SIM110 -- a generator would be slower
            if len(children) != count:
                return False
        return True

    def has_parts_of(self, other: Structure) -> bool:
        """Return True if both consist of the same parts, wrappers left out."""
        counts = [n for _, n in self._counts], [n for _, n in other._counts]
        same = len(self._parts) == len(other._parts) and counts[0] == counts[1]
        return same and all(a is b for a, b in zip(self._parts, other._parts, strict=True))

    def _add_path(self, model: nn.Module, path: str) -> None:
        for parent, name, child in _steps(model, path):
            self._entries.append((parent._modules, name, child))
            self._parts.append(unwrapped(child))
            self._counts.append((unwrapped(child)._modules, len(unwrapped(child)._modules)))

    def _add_forward(self, module: nn.Module) -> None:
        self._entries.append((module.__dict__, "forward", module.__dict__.get("forward")))
        place = own_forward(module)
        if place.holder is not module or place.name != "forward":
            self._entries.append((place.holder.__dict__, place.name, place.get()))
        self._parts.append(decorated_function(module))

    def _add_processor(self, module: nn.Module) -> None:
        for attributes in (module.__dict__, module._modules):
            if "processor" in attributes:
                self._entries.append((attributes, "processor", attributes["processor"]))
                self._parts.append(attributes["processor"])


def _other_paths(rules: Rules) -> Iterator[str]:
    for arguments in rules.arguments:
        yield from arguments.paths
    yield from (outputs.path for outputs in rules.outputs)
    yield from (halo.path for halo in rules.halos)


def _steps(model: nn.Module, path: str) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Walk from a model down to `path`: yield each parent, the name of its child, and the child as registered."""
    found = unwrapped(model)
    for atom in path.split("."):
        children: Any = found._modules
        name = str(len(children) + int(atom)) if atom.startswith("-") else atom
        if name not in children:  # an alias: `submodule` finds it
            child = submodule(found, atom)
        else:
            child = children[name]
            yield found, name, child
        found = unwrapped(child)
