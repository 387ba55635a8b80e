"""Define the valid values of settings as rules: each rule tests a value and describes the valid ones.

pydantic is not used: it would be one more dependency of every installation, and it converts values (the text "2"
becomes 2). Its errors name neither the key of the command line nor the value as it was written there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Protocol

from typing_extensions import override


class Rule(Protocol):
    """A test of one value."""

    def passes(self, value: Any) -> bool:
        """Return True if the value is valid."""

    def describe(self) -> str:
        """Describe the valid values; the text follows "must be" in error messages."""


@dataclass(frozen=True)
class Integer(Rule):
    """An int from `minimum` to `maximum`, both included; the float 2.0 and bool are invalid."""

    minimum: int
    maximum: int | None = None

    @override
    def passes(self, value: Any) -> bool:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return is_integer and value >= self.minimum and (self.maximum is None or value <= self.maximum)

    @override
    def describe(self) -> str:
        if self.maximum is not None:
            return f"a whole number from {self.minimum} to {self.maximum}"
        return f"a whole number, at least {self.minimum}"


@dataclass(frozen=True)
class Number(Rule):
    """A number within bounds; `minimum` and `maximum` are inclusive, `above` and `below` are exclusive.

    Infinity is valid only if `infinite` is set; nan never is.
    """

    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float | None = None
    infinite: bool = False

    @override
    def passes(self, value: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not self.infinite)):
            return False
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.maximum is None or value <= self.maximum)
        )

    @override
    def describe(self) -> str:
        bounds = {"at least": self.minimum, "more than": self.above, "less than": self.below, "at most": self.maximum}
        return "a number " + " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)


@dataclass(frozen=True)
class OneOf(Rule):
    """One of the listed values."""

    choices: Sequence[Any]

    @override
    def passes(self, value: Any) -> bool:
        return any(value == choice and type(value) is type(choice) for choice in self.choices)

    @override
    def describe(self) -> str:
        names = ["null" if choice is None else str(choice) for choice in self.choices]
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]


@dataclass(frozen=True)
class Text(Rule):
    """A string that is not empty or blank."""

    @override
    def passes(self, value: Any) -> bool:
        return isinstance(value, str) and bool(value.strip())

    @override
    def describe(self) -> str:
        return "a text"


@dataclass(frozen=True)
class Either(Rule):
    """A value that passes at least one of two rules."""

    first: Rule
    second: Rule

    @override
    def passes(self, value: Any) -> bool:
        return self.first.passes(value) or self.second.passes(value)

    @override
    def describe(self) -> str:
        return f"{self.first.describe()} or {self.second.describe()}"


@dataclass(frozen=True)
class Each(Rule):
    """A list of `count` values that all pass the rule; None: of one or more."""

    rule: Rule
    count: int | None = None

    @override
    def passes(self, value: Any) -> bool:
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            return False
        return self.count in (None, len(value)) and all(self.rule.passes(x) for x in value)

    @override
    def describe(self) -> str:
        return f"a list of {self.count or 'one or more'}, each {self.rule.describe()}"


def ruled(default: Any, rule: Rule, **others: Any) -> Any:
    """Return a dataclass field with a rule. Args: default: MISSING for none. others: arguments of `field`."""
    return field(default=default, metadata={"rule": rule}, **others)


@cache
def rules_of(settings: type[Any]) -> dict[str, Rule]:
    """Return the rules of a dataclass, by field; fields without a rule are left out."""
    return {one.name: one.metadata["rule"] for one in fields(settings) if "rule" in one.metadata}


def check_rules(settings: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass that have a rule. Args: prefix: in front of the names in errors, such as "lora.".

    Raises: ValueError: the first invalid value.
    """
    for name, rule in rules_of(type(settings)).items():  # type: ignore[arg-type]
        value = getattr(settings, name)
        if not rule.passes(value):
            raise ValueError(f"{prefix}{name}={value!r} must be {rule.describe().replace('null', 'None')}")


MLP_TILES = Either(OneOf((None, "auto")), Integer(1))  # number of tiles of a feed-forward
STALL_S = Either(OneOf((None,)), Number(above=0, infinite=True))  # seconds until a stall is reported
