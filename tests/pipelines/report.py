"""docs/pipelines.md, from what the tests measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HEAD = """# Pipelines

Every pipeline of diffusers 0.42.1 that was tried, with random weights and diffusers' and transformers' own classes, and
how far its latents are from one process': the largest error relative to the largest value, in float32, over all its
tiny variants. Tokens: ring (both rotations) and Ulysses at 2 and 3 ranks, both together at 4. Guidance: `cfg=2` at 2
ranks, with ring=2 and with ulysses=2 at 4; branches are computed in one batch or in several calls. Written by

    LIGHTNING_CP_PIPELINES_TABLE=docs/pipelines.md pytest -q -m "full or not full" tests/pipelines

How to use them: [sampling.md](sampling.md).

| pipeline | variants | tokens | branches | guidance |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Measured:
    """One trial of one pipeline."""

    pipeline: str
    name: str
    guidance: str
    cfg: int
    error: float


def write_table(file: Path, measured: Sequence[Measured]) -> None:
    """Writes docs/pipelines.md."""
    lines = []
    for pipeline in sorted({x.pipeline for x in measured}):
        mine = [x for x in measured if x.pipeline == pipeline]
        names = ", ".join(dict.fromkeys(x.name for x in mine))
        branches = ", ".join(sorted({x.guidance for x in mine} - {"none"})) or "one branch"
        tokens, guidance = (_worst([x.error for x in mine if (x.cfg > 1) == shared]) for shared in (False, True))
        lines.append(f"| {pipeline} | {names} | {tokens} | {branches} | {guidance} |\n")
    file.write_text(_HEAD + "".join(lines))


def _worst(errors: Sequence[float]) -> str:
    return f"{max(errors):.0e}" if errors else "–"
