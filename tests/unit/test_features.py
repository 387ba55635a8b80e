"""The table of docs/sampling.md has a row for each feature that a test names, and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests import features

ROOT = Path(__file__).parents[2]


def named() -> Iterator[tuple[str, str]]:
    """Yield the function and the feature of each call of `features.compared` and `features.refused` in a test."""
    for file in (ROOT / "tests").rglob("test_*.py"):
        text = file.read_text()
        if "features." not in text or file == Path(__file__):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "features":
                assert isinstance(node.args[0], ast.Constant), f"{file.name}:{node.lineno}: not a literal"
                yield node.func.attr, node.args[0].value


def test_the_table_has_the_features_that_tests_name() -> None:
    found = features.rows_of(ROOT / "docs" / "sampling.md")
    expected = {feature: function == "refused" for function, feature in named()}
    assert len(expected) > 1
    assert {feature: result == "refused" for feature, result in found.items()} == expected


def test_rows_are_replaced_and_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- features: begin -->\n| feature | result | largest error |\n|---|---|---|\n"
        "| old | refused | – |\n| cfg=2 | to rounding | 1e-05 |\n<!-- features: end -->\nb\n"
    )
    before = dict(features._errors)
    features._errors.clear()
    try:
        features.compared("cfg=2", 1e-9)
        features.compared("cfg=2", 2e-8)
        features.compared("tiles", 0.0)
        features.refused("PAG")
        features.write_rows(page)
    finally:
        features._errors.clear()
        features._errors.update(before)
    assert features.rows_of(page) == {"cfg=2": "to rounding", "old": "refused", "PAG": "refused", "tiles": "exact"}
    assert "| cfg=2 | to rounding | 2e-08 |" in page.read_text()
    assert page.read_text().endswith("<!-- features: end -->\nb\n")
