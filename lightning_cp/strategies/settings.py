"""Settings of the strategies: frozen, and checked when created. Imports neither torch nor Lightning.

The recipes read the rules of these settings too, and check them before anything slow is imported.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from lightning_cp.config import CHECK_PEERS, ContextParallelConfig, RotateMethod, check_degree
from lightning_cp.mesh.degrees import check_degrees, check_shares
from lightning_cp.rules import MLP_TILES, STALL_S, OneOf, check_rules, ruled


@dataclass(frozen=True)
class StrategySettings:
    """Settings that both strategies have, for Fabric and for the Trainer.

    Attributes: see the arguments of `ContextParallelMixin`; the names and defaults are the same.
    Raises: ValueError, TypeError: an invalid setting; the message names it, its value and the valid values.
    """

    ring: int = 1
    ulysses: int = 1
    data_parallel: int | str = "auto"
    rotate_method: RotateMethod = "allgather"
    grid: Sequence[int] | None = None
    convert_to_fp32: bool = True
    mesh: Any = None
    plans: Mapping[Any, object] | None = None
    modules: Sequence[Any] | None = None
    kernel: str = "auto"
    check_peers: str = ruled("sampled", OneOf(CHECK_PEERS))
    stall_s: float | None = ruled(60.0, STALL_S)
    shares: Sequence[float] | None = None
    degrees: Mapping[int, int] | str | None = None
    mlp_tiles: int | str | None = ruled(None, MLP_TILES)

    def __post_init__(self) -> None:
        check_degree("ring", self.ring, default=1)
        check_degree("ulysses", self.ulysses, default=1)
        if self.data_parallel != "auto":
            check_degree("data_parallel", self.data_parallel, default=1)
        if self.plans is not None and not isinstance(self.plans, Mapping):
            raise TypeError(
                f"plans={self.plans!r} must be a dict from model classes or names to plans, not a "
                f"{type(self.plans).__name__}"
            )
        if isinstance(self.modules, (str, type)) or not isinstance(self.modules, (Sequence, type(None))):
            raise TypeError(f"modules={self.modules!r} must be a list of model classes or names")
        check_rules(self)
        others = {"mesh": self.mesh, "shares": self.shares, "grid": self.grid}
        check_degrees(self.degrees, ring=self.ring, ulysses=self.ulysses, **others)
        check_shares(self.shares, ring=self.config.ring, ulysses=self.config.ulysses)

    @cached_property
    def config(self) -> ContextParallelConfig:
        """Settings of context parallelism; degrees that are left at 1 are read from the mesh, if there is one."""
        from_mesh = self.mesh is not None and (self.ring, self.ulysses) == (1, 1)
        return ContextParallelConfig(
            ring_degree=None if from_mesh else self.ring,
            ulysses_degree=None if from_mesh else self.ulysses,
            convert_to_fp32=self.convert_to_fp32,
            rotate_method=self.rotate_method,
            grid=self.grid,  # type: ignore[arg-type]
            mesh=self.mesh,
        )

    @classmethod
    def pick(cls, arguments: Mapping[str, Any]) -> StrategySettings:
        """Create the settings from the arguments of a strategy's constructor; other arguments are ignored."""
        return cls(**{one.name: arguments[one.name] for one in fields(cls)})


def known_settings(strategy: type[Any]) -> set[str]:
    """List the setting names that a strategy and its bases accept."""
    return {
        name
        for kind in (*strategy.__mro__[:-1], *strategy._kwargs_targets)
        for name in inspect.signature(kind.__init__).parameters
    }


def check_known(strategy: type[Any], settings: Mapping[str, Any]) -> None:
    """Check setting names. Raises: TypeError: unknown to this strategy, Lightning's strategy and PyTorch's DDP."""
    known = known_settings(strategy)
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{strategy.__name__} has no setting {name!r}{hint}")
