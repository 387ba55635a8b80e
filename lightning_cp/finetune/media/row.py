"""Check the values of a table's row."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_cp.errors import DataError
from lightning_cp.files import parse_json
from lightning_cp.finetune.media.text import is_unicode


@dataclass(frozen=True)
class Row:
    """Values of a row by column. Numbers may be texts, as in CSV.

    Args:
        where: table and line, for errors.
        values: without empty cells and null.
    """

    where: str
    values: dict[str, Any]

    def given(self, name: str) -> bool:
        """Return True if the row has a value in this column."""
        return name in self.values

    def path(self, name: str, folder: Path) -> Path | None:
        """Return a path, joined to `folder` if it is relative; None if not given."""
        if name not in self.values:
            return None
        text = self._text(name, self.values[name]).strip()
        if not text:
            raise self._error(name, "a path")
        return Path(os.path.normpath(folder / text))

    def captions(self) -> tuple[str, ...]:
        """Return the non-empty captions of `caption` (a text, or a list) or `captions`, without white space around."""
        if self.given("caption") and self.given("captions"):
            raise DataError(f"{self.where}: give caption or captions, not both")
        if self.given("captions"):
            texts = self._list("captions")
        elif isinstance(self.values.get("caption"), list):
            texts = self._list("caption")
        else:
            texts = [self._text("caption", self.values["caption"])] if self.given("caption") else []
        return tuple(text.strip() for text in texts if text.strip())

    def integer(self, name: str, *, least: int, most: int | None = None) -> int | None:
        """Return a whole number from `least` to `most`; None if not given."""
        if name not in self.values:
            return None
        expected = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        expected += "" if most is None else f" and at most {most}"
        value = self.values[name]
        if isinstance(value, str):
            try:
                value = int(value)
            except ValueError:
                raise self._error(name, expected) from None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= (most or value):
            raise self._error(name, expected)
        return value

    def seconds(self, name: str) -> float | None:
        """Return a time in seconds; None if not given."""
        if name not in self.values:
            return None
        value = self.values[name]
        try:
            seconds = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds >= 0):
            raise self._error(name, "a time in seconds, such as 2.5")
        return seconds

    def _list(self, name: str) -> list[str]:
        value = self.values[name]
        if isinstance(value, str):  # a cell of a CSV file
            try:
                value = parse_json(value)
            except ValueError:
                value = None
        if not isinstance(value, list):
            raise self._error(name, 'a JSON list of texts, such as ["a cat", "a small cat"]')
        return [self._text(name, item) for item in value]

    def _text(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not is_unicode(value):
            raise self._error(name, "a text")
        return value

    def _error(self, name: str, expected: str) -> DataError:
        return DataError(f"{self.where}: {name}={self.values[name]!r} must be {expected}")
