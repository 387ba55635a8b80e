"""The tested pipelines of docs/sampling.md, from what the tests measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LIST = re.compile(r"(<!-- pipelines: [^>]*-->\n).*?(<!-- end -->)", re.DOTALL)
_TITLES = {"batch": "Branches of guidance in one batch", "calls": "A call for each branch", "none": "No guidance"}


@dataclass(frozen=True)
class Measured:
    """One trial of one pipeline."""

    pipeline: str
    guidance: str  # none, batch or calls
    error: float


def write_list(file: Path, measured: Sequence[Measured]) -> None:
    """Write the pipelines into the page: by their branches of guidance, with the largest error of each kind."""
    branches: dict[str, str] = {}
    for one in measured:
        if branches.get(one.pipeline, "none") == "none":
            branches[one.pipeline] = one.guidance
    lines = []
    for kind, title in _TITLES.items():
        names = sorted(name for name, found in branches.items() if found == kind)
        error = max((x.error for x in measured if branches[x.pipeline] == kind), default=0.0)
        lines.append(f"\n**{title}** ({error:.0e}): {', '.join(name.removesuffix('Pipeline') for name in names)}.\n")
    file.write_text(_LIST.sub(lambda found: found[1] + "".join(lines) + "\n" + found[2], file.read_text()))
