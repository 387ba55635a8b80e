"""Switch transformers between context degrees, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lightning_cp.config import ContextParallelConfig
from lightning_cp.data.step_degrees import Shard, StepDegrees
from lightning_cp.engine.session import Session
from lightning_cp.mesh.degrees import context_shape
from lightning_cp.mesh.groups import MeshGroups, groups_for


@dataclass(frozen=True)
class DegreeGroups:
    """The process groups of every context degree of a job.

    A smaller context group has neighbouring ranks of a larger one, so ranks that share a sample at any degree also
    share the random state and the inputs of the largest degree.

    Args:
        by_tokens: largest number of tokens of a sample -> context degree.
        built: settings and groups by degree, the largest degree is that of the strategy.
    """

    by_tokens: Mapping[int, int]
    built: Mapping[int, tuple[ContextParallelConfig, MeshGroups]]

    @classmethod
    def build(
        cls, config: ContextParallelConfig, groups: MeshGroups, by_tokens: Mapping[int, int] | None
    ) -> DegreeGroups:
        """Build the groups. Args: config, groups: config and groups of the strategy. Ranks: the whole world."""
        degrees = dict(by_tokens or {})
        ring, ulysses = groups.context_shape
        built = {groups.context_size: (config, groups)}
        for degree in sorted({*degrees.values()} - built.keys()):
            shape = context_shape(degree, ring=ring, ulysses=ulysses)
            smaller = replace(config, ring_degree=shape[0], ulysses_degree=shape[1])
            built[degree] = smaller, groups_for(smaller)
        return cls(degrees, built)

    @property
    def steps(self) -> StepDegrees:
        """The degrees, and this rank's data group at each of them."""
        shards = {degree: Shard(groups.data_rank, groups.data_size) for degree, (_, groups) in self.built.items()}
        return StepDegrees(shards, self.by_tokens)

    def use(self, degree: int | None, sessions: Iterable[Session]) -> MeshGroups:
        """Compute the following forwards of models in context groups of `degree` ranks; None: the largest degree.

        Returns: the groups. Ranks: the whole world. Raises: ValueError: no groups were built for this degree.
        """
        chosen = max(self.built) if degree is None else degree
        if chosen not in self.built:
            raise ValueError(f"degree={degree} must be one of {sorted(self.built)}: add it to the strategy's `degrees`")
        config, groups = self.built[chosen]
        for session in sessions:
            session.use(config, groups)
        return groups
