"""Settings of `parallelize_pipeline`, checked when they are created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_cp.config import ContextParallelConfig, check_degree, context_config
from lightning_cp.engine.graphs.forward import Graphs
from lightning_cp.rules import STALL_S

Placement = Literal["together", "offload", "release"]


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """Arguments of `parallelize_pipeline`, which describes them.

    Attributes:
        config: `parallel_config`, as this class.
        num_stages: number of stages of blocks.
    Raises: ValueError, TypeError: an invalid setting, or two that cannot be combined.
    """

    parallel_config: object
    cfg: Any
    pipe: Any
    patches: Any
    warmup: Any
    vae: Any
    shard: Sequence[str]
    stages: Placement
    kernel: str
    check_peers: str
    stall_s: float | None
    shares: Sequence[float] | None
    graphs: Graphs
    config: ContextParallelConfig = field(init=False)
    num_stages: int = field(init=False)

    def __post_init__(self) -> None:
        if not STALL_S.passes(self.stall_s):
            raise ValueError(f"stall_s={self.stall_s!r} must be {STALL_S.describe().replace('null', 'None')}")
        pipe = len(self.pipe) if isinstance(self.pipe, (list, tuple)) else self.pipe
        checked = {
            "config": context_config(self.parallel_config),
            "cfg": check_degree("cfg", self.cfg, default=1),
            "num_stages": check_degree("pipe", pipe, default=1),
            "patches": check_degree("patches", self.patches, default=1),
            "shard": tuple(dict.fromkeys([self.shard] if isinstance(self.shard, str) else self.shard)),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.patches == 1 and self.warmup != 1:
            raise ValueError(f"warmup={self.warmup} has no meaning with patches=1, which is exact: leave it out")
        check_degree("warmup", self.warmup, default=1)
        if self.stages not in get_args(Placement):
            raise ValueError(f"stages={self.stages!r} must be one of {', '.join(map(repr, get_args(Placement)))}")
        if self.vae not in (True, False, "auto"):
            raise ValueError(f"vae={self.vae!r} must be True, False or 'auto'")
        if self.graphs not in (True, False, "auto"):
            raise ValueError(f"graphs={self.graphs!r} must be True, False or 'auto'")
        if self.graphs is True and (self.num_stages > 1 or self.patches > 1):
            raise ValueError(
                "graphs=True cannot be combined with pipe or patches, for which the host decides what to compute in "
                "each step: use graphs='auto' or False"
            )
