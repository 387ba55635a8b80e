"""Add sections to a model card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_cp.checkpoint.folder import atomic_file


def add_section(card: Path, title: str, lines: Sequence[str]) -> None:
    """Add a section at the end of a card in Markdown, in place of an older one with the same title.

    Raises: OSError: the card cannot be read or written. It is then unchanged.
    """
    parts = card.read_text(encoding="utf-8").split("\n## ")
    kept = [part.rstrip("\n") for part in parts if part.split("\n", 1)[0] != title]
    with atomic_file(card) as scratch:
        scratch.write_text("\n\n## ".join([*kept, "\n".join([title, "", *lines])]) + "\n", encoding="utf-8")
