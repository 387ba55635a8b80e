"""Compare a pipeline's components between the ranks that share a sample: settings at each call, weights if changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_cp.comm.agree import gather_objects
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.engine.peers.checksum import checksum, digest_ints, plain_tensors, version_of
from lightning_cp.errors import PeerMismatchError

_PLAIN = (bool, int, float, str, type(None))


def _config_of(component: Any) -> Mapping[str, Any]:
    config = getattr(component, "config", {})  # a mapping in diffusers, an object in transformers
    settings: Mapping[str, Any] = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return settings


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name): x
        for name, x in values.items()
        if not str(name).startswith("_")
        and (isinstance(x, _PLAIN) or (isinstance(x, (list, tuple)) and all(isinstance(one, _PLAIN) for one in x)))
    }


@dataclass(frozen=True)
class _Weight:
    """One weight when its checksum was computed.

    It holds no reference to the tensor, which torch could then not swap for another one.

    Attributes:
        module: has the weight. key: id and version of the weight. kind: its shape and dtype.
        checksum: None if the values are on no device, or divided over ranks.
    """

    module: ReferenceType[nn.Module]
    key: tuple[int, int, bool]
    kind: str
    checksum: int | None

    @classmethod
    def of(cls, module: nn.Module, x: Tensor) -> _Weight:
        has_values = not (x.is_meta or isinstance(x, DTensor) or x.layout != torch.strided)
        return cls(ref(module), _key(x), f"{tuple(x.shape)} {x.dtype}", checksum(x) if has_values else None)

    def is_of(self, module: nn.Module, x: Tensor) -> bool:
        return self.module() is module and self.key == _key(x)


def _key(x: Tensor) -> tuple[int, int, bool]:
    return id(x), version_of(x), x.is_meta


class EqualComponents:
    """Compares the components of a pipeline between the ranks that share a sample.

    Args:
        group: gloo group of these ranks; None: a single rank.
        is_on: False: compare nothing.
        in_stages: the ranks have different blocks: only weights that two ranks have are compared.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, is_on: bool, in_stages: bool) -> None:
        self._group, self._in_stages, self.is_on = group, in_stages, is_on
        self._known: dict[str, _Weight] = {}
        self._digest = [0, 0, 0]

    def settings(self, pipeline: Any, transformers: Collection[str]) -> dict[str, Any]:
        """Return class, configuration and public plain attributes of the pipeline and of each component, by name.

        The caller compares them at each call. Attributes are those of modules: tiling and slicing, for example. Calls
        may change those of tokenizers and schedulers. Names that begin with an underscore are versions and paths, and
        left out.

        Args: transformers: names of components. Their configuration is left out: calls may change it.
        """
        if not self.is_on:
            return {}
        settings = {"pipeline": {"class": type(pipeline).__qualname__, **_plain(getattr(pipeline, "config", {}))}}
        for name, component in pipeline.components.items():
            of_module = _plain(vars(component)) if isinstance(component, nn.Module) else {}
            settings[name] = {"class": type(component).__qualname__, **of_module}
            if name not in transformers:
                settings[name]["config"] = _plain(_config_of(component))
            if isinstance(component, Sized) and hasattr(component, "model_max_length"):  # a tokenizer
                settings[name] |= {"tokens": len(component), "model_max_length": component.model_max_length}
        return settings

    def compare_weights(self, components: Mapping[str, Any]) -> None:
        """Compare all weights, with one exchange of four numbers if they have not changed.

        A checksum of each weight is computed at first, and again if its version has changed. Later changes of
        `weight.data` are not noticed.

        Ranks: all of `group`. Raises: PeerMismatchError: a weight differs, or is missing on a rank (on all of them).
        """
        if self._group is None or not self.is_on:
            return
        has_changed = self._update(components)
        by_rank = all_gather_ints([int(has_changed), *self._digest], group=self._group)
        are_equal = all(digest == by_rank[0][1:] for _, *digest in by_rank)
        if are_equal or (self._in_stages and not any(changed for changed, *_ in by_rank)):
            return
        local_weights = {name: (x.kind, x.checksum) for name, x in self._known.items()}
        gathered = gather_objects(local_weights, self._group)
        first: dict[str, Any] = {}
        for rank, other in enumerate(gathered):
            first = {**other, **first} if self._in_stages else first or other
            difference = self._difference(first, other)
            if difference:
                raise PeerMismatchError(
                    f"ranks that share a sample must have equal weights, but {difference} (rank {rank} of this group, "
                    "compared with the ranks before it): load the same weights on these ranks, by the same calls"
                )

    def _update(self, components: Mapping[str, Any]) -> bool:
        """Compute the checksums of weights that have changed. Returns: whether any has."""
        known = self._known
        weights = {
            name: known[name] if name in known and known[name].is_of(module, x) else _Weight.of(module, x)
            for name, module, x in _weights(components)
        }
        has_changed = weights.keys() != known.keys() or any(weights[name] is not known[name] for name in weights)
        if has_changed:
            self._known = weights
            self._digest = digest_ints([(name, x.kind, x.checksum) for name, x in weights.items()])
        return has_changed

    def _difference(self, first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
        for name in dict.fromkeys([*first, *other]):
            if name not in first or name not in other:
                if not self._in_stages:
                    return f"{name} is on one of them only"
                continue
            (kind, expected), (other_kind, actual) = first[name], other[name]
            if kind != other_kind:
                return f"{name} is {other_kind} on one and {kind} on the other"
            if None not in (expected, actual) and expected != actual:
                return f"the values of {name} differ"
        return ""


def _weights(components: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield name, module and values of each parameter and persistent buffer of components, shared ones once."""
    seen: set[int] = set()
    for component_name, component in components.items():
        for path, module in component.named_modules(prefix=component_name) if isinstance(component, nn.Module) else ():
            kept = {key: x for key, x in module._buffers.items() if key not in module._non_persistent_buffers_set}
            for key, x in (*module._parameters.items(), *kept.items()):
                if x is None or id(x) in seen or is_lazy(x) or not x.numel():  # none: in a block of another stage
                    continue
                seen.add(id(x))
                for name, values in plain_tensors(f"{path}.{key}", x):
                    yield name, module, values
