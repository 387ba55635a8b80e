"""The modes in which models are tried, by the number of ranks."""

from __future__ import annotations

from lightning_cp import ContextParallelConfig

# "replay": blocks are done again in backward (enable_gradient_checkpointing).
MODES = {
    "ring": lambda n: ContextParallelConfig(ring_degree=n),
    "rotation": lambda n: ContextParallelConfig(ring_degree=n, rotate_method="alltoall"),
    "grid": lambda n: ContextParallelConfig(ring_degree=n, rotate_method="grid"),
    "ulysses": lambda n: ContextParallelConfig(ulysses_degree=n),
    "unified": lambda n: ContextParallelConfig(ring_degree=2, ulysses_degree=n // 2),
    "unified3": lambda n: ContextParallelConfig(ring_degree=3, ulysses_degree=n // 3),
    "replay": lambda n: ContextParallelConfig(ring_degree=n, rotate_method="alltoall"),
}
