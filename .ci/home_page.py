"""mkdocs hook: the home page is README.md, whose links to docs/ become links of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: Any) -> Files:
    """Add index.md."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files
