"""Settings of a LoRA, and their rules. Imports no torch: the recipes check them before anything slow is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_cp.rules import Either, Integer, Number, OneOf, Rule, Text, check_rules, ruled

_NULL = OneOf((None,))


@dataclass(frozen=True)
class _Targets(Rule):
    @override
    def passes(self, value: Any) -> bool:
        if value is None or isinstance(value, str):
            return True
        return isinstance(value, Sequence) and len(value) > 0 and all(map(Text().passes, value))

    @override
    def describe(self) -> str:
        return "a list of names such as [to_q,to_v], or a regular expression"


@dataclass(frozen=True)
class _Ranks(Rule):
    @override
    def passes(self, value: Any) -> bool:
        return value is None or (
            isinstance(value, Mapping) and len(value) > 0 and all(map(Integer(1).passes, value.values()))
        )

    @override
    def describe(self) -> str:
        return "null, or whole numbers of at least 1 by the ends of layers' names, such as {to_q: 8}"


@dataclass(frozen=True)
class LoraSettings:
    """Settings of a LoRA.

    Args:
        rank: rank of the matrices; None: that of `file`, or 16.
        alpha: the adapter's output is scaled by alpha / rank; None: `rank`, or that of `file`.
        targets: layers to adapt: ends of their names, or a regular expression that matches whole names; None: the
            family's, or those of `file`; "all-linear": every linear layer. In a list, "default" means the family's and
            "text" the layers of the text stream of a model with joint attention.
        dropout: probability of dropping an element of an adapter's input, in [0, 1). On shards, each rank draws its
            own elements from the shared random state.
        file: LoRA in diffusers' format to continue, or a folder with one.
        ranks: ranks of layers by the ends of their names, in place of `rank`; the last one that matches counts. Without
            `alpha`, the scale of each layer is 1.
        dora: train the norms of the adapted layers' weights, too (DoRA, arXiv:2402.09353).
        lokr: train Kronecker products in place of a LoRA (LoKr, arXiv:2309.14859): the size of the first factor, if it
            divides that of the layer; -1 makes both factors about equally large. `rank` is that of the second factor.
    Raises: ValueError: an invalid value.
    """

    rank: int | None = ruled(None, Either(_NULL, Integer(1)))
    alpha: float | None = ruled(None, Either(_NULL, Number(above=0)))
    targets: Sequence[str] | str | None = ruled(None, _Targets())
    dropout: float = ruled(0.0, Number(minimum=0, below=1))
    file: str | Path | None = ruled(None, Either(_NULL, Text()))
    ranks: Mapping[str, int] | None = ruled(None, _Ranks())
    dora: bool = ruled(False, OneOf((True, False)))
    lokr: int | None = ruled(None, Either(OneOf((None, -1)), Integer(2)))

    def __post_init__(self) -> None:
        if isinstance(self.file, Path):
            object.__setattr__(self, "file", str(self.file))
        check_rules(self, "lora.")
        plain_only = {"lora.ranks": self.ranks, "lora.dora": self.dora, "lora.lokr": self.lokr}
        if self.file is not None and (name := next((name for name, value in plain_only.items() if value), None)):
            raise ValueError(f"{name} does not work with lora.file: only a plain LoRA of one rank is continued")
        if self.lokr is not None and (self.dora or self.dropout):
            name = "lora.dora" if self.dora else "lora.dropout"
            raise ValueError(f"{name} does not work with lora.lokr: leave one out")
        if isinstance(self.targets, str):
            try:
                re.compile(self.targets)
            except re.error as error:
                raise ValueError(f"lora.targets={self.targets} is not a valid regular expression: {error}") from None
        elif self.targets is not None:
            object.__setattr__(self, "targets", tuple(self.targets))
