"""Print texts that contain names, captions or prompts of the user: they may hold markup and control characters."""

from __future__ import annotations

import sys
import unicodedata
from typing import Any

from rich.console import Console
from rich.markup import escape

_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, formatting (also of direction), undecodable bytes, line separators


def printable(text: object, *, keep: str = "\n\t") -> str:
    """Escape what could change the terminal, or cannot be written to it.

    Args: keep: control characters that stay; "" for a single line.
    """
    safe = (c if c in keep or unicodedata.category(c) not in _UNSAFE else ascii(c)[1:-1] for c in str(text))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return "".join(safe).encode(encoding, "backslashreplace").decode(encoding)


def rich_text(text: object) -> str:
    """Return a single line for rich that shows `text` as it is: markup in it has no effect."""
    return escape(printable(text, keep=""))


def console(*, width: int = 120) -> Console:
    """Return a console that does not replace names such as `:cat:`. Args: width: columns without a terminal."""
    return Console(width=None if sys.stdout.isatty() else width, emoji=False)


def print_error(text: object, **options: Any) -> None:
    """Print `error: …` to stderr."""
    print(f"error: {printable(text)}", file=sys.stderr, **options)
