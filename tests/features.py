"""The table of features in docs/sampling.md, from what the tests found.

A test calls `compared` or `refused` with the name of its feature, as a literal. At the end of

    LIGHTNING_CP_FEATURES_TABLE=docs/sampling.md pytest -q -m "full or not full" tests/dist/test_x.py

the rows of the features that these tests named are replaced, and other rows stay.
"""

from __future__ import annotations

import re
from pathlib import Path

VARIABLE = "LIGHTNING_CP_FEATURES_TABLE"
_BEGIN, _END = "<!-- features: begin -->\n", "<!-- features: end -->\n"
_HEAD = "| feature | result | largest error |\n|---|---|---|\n"
_errors: dict[str, float | None] = {}


def compared(feature: str, error: float) -> None:
    """Note the largest error of a feature against one process, relative to the largest value; 0: bit for bit."""
    before = _errors.get(feature, 0.0)
    assert before is not None, f"{feature} is refused and compared"
    _errors[feature] = max(before, error)


def refused(feature: str) -> None:
    """Note that a feature is refused, by an error that names it."""
    assert _errors.get(feature) is None, f"{feature} is refused and compared"
    _errors[feature] = None


def write_rows(file: Path) -> None:
    """Write the rows of the features that were noted into the file's table."""
    text = file.read_text()
    before, rest = text.split(_BEGIN)
    rows, after = rest.split(_END)
    found = dict(re.findall(r"^\| (.+?) (\|.*)$", rows.removeprefix(_HEAD), re.MULTILINE))
    found |= {name: _row(error) for name, error in _errors.items()}
    lines = "".join(f"| {name} {row}\n" for name, row in sorted(found.items(), key=lambda x: x[0].lower()))
    file.write_text(f"{before}{_BEGIN}{_HEAD}{lines}{_END}{after}")


def rows_of(file: Path) -> dict[str, str]:
    """Return the results by feature in the file's table."""
    rows = file.read_text().split(_BEGIN)[1].split(_END)[0].removeprefix(_HEAD)
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|", rows, re.MULTILINE))


def _row(error: float | None) -> str:
    if error is None:
        return "| refused | – |"
    return f"| to rounding | {error:.0e} |" if error else "| exact | 0 |"
