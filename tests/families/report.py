"""Write the table of docs/families.md from measured errors.

LIGHTNING_CP_FAMILIES=errors.jsonl pytest -q -m "full or not full" tests/families tests/dist/finetune/test_families.py
python -m tests.families.report errors.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "families.md"
_BEGIN, _END = "<!-- table: written by tests/families/report.py -->\n", "<!-- end of table -->\n"
_COLUMNS = ("capture", "oracle", "batch", "capture bf16", "oracle bf16", "ranks")


def record(family: str, pipeline: str, case: str, column: str, error: float) -> None:
    """Append an error to the file that LIGHTNING_CP_FAMILIES names, if it is set."""
    file = os.environ.get("LIGHTNING_CP_FAMILIES")
    if file:
        row = {"family": family, "pipeline": pipeline, "case": case, "column": column, "error": error}
        with Path(file).open("a", encoding="utf-8") as rows:
            rows.write(f"{json.dumps(row)}\n")


def table(rows: list[dict[str, str | float]]) -> str:
    """Return the table in Markdown: a line per pipeline, with the largest error over its variants."""
    pipelines = sorted({str(row["pipeline"]) for row in rows})
    lines = [f"| pipeline | {' | '.join(_COLUMNS)} |", f"|---|{'---|' * len(_COLUMNS)}"]
    for pipeline in pipelines:
        mine = [row for row in rows if row["pipeline"] == pipeline]
        errors = [[float(row["error"]) for row in mine if row["column"] == column] for column in _COLUMNS]
        shown = [f"{max(found):.0e}" if found else "–" for found in errors]
        lines.append(f"| {pipeline} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main(file: str) -> None:
    """Replace the table of docs/families.md. Args: file: the recorded errors."""
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    before, _, rest = _PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    _PAGE.write_text(f"{before}{_BEGIN}{table(rows)}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
