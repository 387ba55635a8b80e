"""docs/pipelines.md, from what the tests measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HEAD = """# Pipelines

The table lists every tested pipeline of diffusers 0.42.1, with the largest error of its latents: the difference from
one process relative to the largest value, in float32, over all tiny variants of the pipeline. The variants have random
weights and consist of diffusers' and transformers' own classes. [sampling.md](sampling.md) explains how to use a
pipeline on several ranks.

- *tokens*: error with a ring (both rotate methods) and with Ulysses at 2 and 3 ranks, and with both together at 4.
- *branches*: how the pipeline computes the branches of guidance: in one batch, or in several calls of the transformer.
- *guidance*: error with `cfg=2` at 2 ranks, and with `ring=2` or `ulysses=2` in addition at 4.

The table is written by

    LIGHTNING_CP_PIPELINES_TABLE=docs/pipelines.md pytest -q -m "full or not full" tests/pipelines

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
