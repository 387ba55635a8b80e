"""Choose the context degree of a step by the length of its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Shard(NamedTuple):
    """This rank's share of the data. Attributes: rank: index of its data group; size: number of data groups."""

    rank: int
    size: int


@dataclass(frozen=True)
class StepDegrees:
    """The context degrees of a job, and this rank's data group at each of them.

    Args:
        shards: data group of this rank by context degree; the largest degree is used for the longest samples.
        by_tokens: largest number of tokens of a sample -> the degree for samples of this length.
    Raises: ValueError: a degree of `by_tokens` is not in `shards`.
    """

    shards: Mapping[int, Shard]
    by_tokens: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tokens, degree in self.by_tokens.items():
            if degree not in self.shards:
                raise ValueError(f"by_tokens={{{tokens}: {degree}}}: the degree must be one of {sorted(self.shards)}")

    @classmethod
    def fixed(cls, shard: Shard) -> StepDegrees:
        """Return the degrees of a job with one degree."""
        return cls({1: shard})

    def degree_of(self, tokens: int) -> int:
        """Return the context degree of a step. Args: tokens: length of its longest sample."""
        return min(
            ((limit, degree) for limit, degree in self.by_tokens.items() if tokens <= limit),
            default=(0, max(self.shards)),
        )[1]
