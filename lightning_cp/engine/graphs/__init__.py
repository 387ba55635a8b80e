"""CUDA graphs of a parallel model's forward: a step as fast as the GPU, where the host would be the limit."""

from lightning_cp.engine.graphs.forward import GraphedForward, Graphs, capture_forward
from lightning_cp.engine.graphs.recorder import recorder_for

__all__ = ["GraphedForward", "Graphs", "capture_forward", "recorder_for"]
