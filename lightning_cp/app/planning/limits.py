"""Up to which degree more ranks pay, and what bounds the next one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from lightning_cp.planning.request import Choice, Plan
from lightning_cp.planning.search import CLASS

DEGREES = ("data", "cfg", "ulysses", "ring", "ranks")


@dataclass(frozen=True)
class Limit:
    """Up to which degree of one kind more ranks pay.

    Attributes:
        name: "data", "cfg", "ulysses" or "ring", without the others of the last three; "ranks": the best layouts.
        degree: the first one for which neither twice nor four times of it makes the time of a sample 15 % shorter.
            Ranks of a second node may gain little, and those of more nodes much.
        gain: time of a sample divided by that at twice the degree; None: all planned degrees pay.
        bound: what takes most of the time at twice the degree, or at the largest one if all pay.
    """

    name: str
    degree: int
    gain: float | None = None
    bound: str = ""

    def __str__(self) -> str:
        if self.gain is None:
            return f"{self.name} pays up to {self.degree:,}, the most that was planned (bound: {self.bound})"
        times = f"{2 * self.degree:,} is {self.gain:.2f} times as fast"
        return f"{self.name} pays up to {self.degree:,}: {times} (bound: {self.bound})"

    @property
    def cell(self) -> str:
        """A short text, for a table."""
        if self.gain is None:
            return f"{self.degree:,}, the most ({self.bound})"
        return f"{self.degree:,} ({2 * self.degree:,}: × {self.gain:.2f}, {self.bound})"


def limits_of(plans: Sequence[Plan]) -> list[Limit]:
    """Return the limits of plans of one device, which differ in their numbers of ranks."""
    return [limit for name in DEGREES for limit in [_limit(plans, name)] if limit is not None]


def _limit(plans: Sequence[Plan], name: str) -> Limit | None:
    """Return one limit. In training, context degrees are compared at the number of ranks where they gain most."""
    gains: dict[tuple[int, int], float] = {}  # degree, and two or four times it
    bounds: dict[int, str] = {}
    degrees: set[int] = set()
    for fastest in _compared(plans, name):
        degrees |= fastest.keys()
        seconds = {degree: choice.sample_s for degree, choice in fastest.items()}
        bounds |= {degree: choice.times.bound for degree, choice in fastest.items() if degree not in bounds}
        for degree, factor in product(seconds, (2, 4)):
            more, key = degree * factor, (degree, degree * factor)
            if more in seconds and seconds[degree] / seconds[more] > gains.get(key, 0.0):
                gains[key] = seconds[degree] / seconds[more]
                bounds[more] = fastest[more].times.bound
    for degree in sorted(degrees):
        gain = gains.get((degree, 2 * degree))
        if gain is not None and max(gain, gains.get((degree, 4 * degree), 0.0)) < CLASS:
            return Limit(name, degree, gain, bounds[2 * degree])
    return Limit(name, max(degrees), bound=bounds[max(degrees)]) if gains else None


def _compared(plans: Sequence[Plan], name: str) -> Iterator[dict[int, Choice]]:
    """Yield layouts to compare, by their degree of one kind: the fastest one of each."""
    if name in ("ranks", "data") or plans[0].request.task == "sample":
        yield _fastest(x for found in plans for x in _by_degree(found, name))
    else:
        yield from (_fastest(_by_degree(found, name)) for found in plans)


def _by_degree(found: Plan, name: str) -> Iterator[tuple[int, Choice]]:
    """Yield layouts with their degree of one kind. In sampling, ranks on other prompts do not make a sample faster."""
    trains = found.request.task == "train"
    others = [key for key in ("cfg", "ulysses", "ring") if key != name]
    for x in found.choices:
        if name == "ranks" and (trains or x.layout.data == 1):
            yield x.layout.ranks, x
        elif name != "ranks" and (trains or name != "data") and all(getattr(x.layout, key) == 1 for key in others):
            yield getattr(x.layout, name), x


def _fastest(layouts: Iterable[tuple[int, Choice]]) -> dict[int, Choice]:
    found: dict[int, Choice] = {}
    for degree, choice in layouts:
        if degree not in found or choice.sample_s < found[degree].sample_s:
            found[degree] = choice
    return found
