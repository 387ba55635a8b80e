"""Degrees that the calls of one parallel pipeline may choose from, declared when it is made parallel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_cp.config import ContextParallelConfig, check_degree
from lightning_cp.mesh.sample_groups import SampleGroups, sample_groups_for

DEFAULT = "default"
_NAMES = ("ring", "ulysses", "cfg")


@dataclass(frozen=True, eq=False)
class Degrees:
    """One way to use the ranks of a sample: settings with the degrees, and the groups that were built for them."""

    config: ContextParallelConfig
    ranks: SampleGroups


def declared_degrees(
    declared: Mapping[str, Mapping[str, int]],
    config: ContextParallelConfig,
    ranks: SampleGroups,
    *,
    sharded: str | None = None,
) -> dict[str, Degrees]:
    """Check all declared degrees, then build their groups.

    Args:
        declared: for each name, the degrees `ring`, `ulysses` and `cfg`; those left out are 1.
        config: settings of the default degrees; the others differ from it by their degrees only.
        ranks: groups of the default degrees.
        sharded: name of a transformer with sharded weights.
    Ranks: the whole world. Raises: ValueError, TypeError: invalid degrees, or another number of ranks than the default.
    """
    if not isinstance(declared, Mapping):
        raise TypeError(f"degrees={declared!r} must be a mapping from names to degrees")
    if declared and config.mesh is not None:
        raise ValueError(f"degrees={sorted(declared)} cannot be combined with a mesh: leave mesh out of the config")
    sizes = {name: _sizes(name, degrees) for name, degrees in declared.items()}
    expected = ranks.sample.context_size
    for name, (ring, ulysses, cfg) in sizes.items():
        if name == DEFAULT:
            raise ValueError(f"degrees[{name!r}] is the name of the degrees in parallel_config: use another name")
        if ring * ulysses * cfg != expected:
            raise ValueError(
                f"degrees[{name!r}]: ring={ring} x ulysses={ulysses} x cfg={cfg} must be {expected} ranks, as many as "
                "parallel_config and cfg use for a sample"
            )
        if sharded is not None and cfg != ranks.cfg:
            raise ValueError(
                f"degrees[{name!r}]: cfg={cfg} must be {ranks.cfg}, because the weights of {sharded} are sharded over "
                f"the ranks of one branch of guidance (shard={sharded!r})"
            )
    by_name = {DEFAULT: Degrees(config, ranks)}
    for name, (ring, ulysses, cfg) in sorted(sizes.items()):
        chosen = replace(config, ring_degree=ring, ulysses_degree=ulysses)
        by_name[name] = Degrees(chosen, sample_groups_for(chosen, cfg))
    return by_name


def _sizes(name: str, degrees: Mapping[str, int]) -> tuple[int, int, int]:
    if not isinstance(degrees, Mapping) or not degrees.keys() <= set(_NAMES):
        raise ValueError(f"degrees[{name!r}]={degrees!r} must be a mapping with the keys {', '.join(_NAMES)}")
    ring, ulysses, cfg = (check_degree(f"degrees[{name!r}][{x!r}]", degrees.get(x), default=1) for x in _NAMES)
    return ring, ulysses, cfg
