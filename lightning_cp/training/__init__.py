"""Flow-matching training of class-conditioned transformers: the same losses at every degree of parallelism."""

from lightning_cp.training.denoiser import ClassTokens, FluxDenoiser, WanDenoiser
from lightning_cp.training.ema import WeightAverage
from lightning_cp.training.flow import FlowBatch, FlowMatching
from lightning_cp.training.loop import LoopSettings, StepReport, Steps, Watcher
from lightning_cp.training.noise import sample_dropped, sample_noise, sample_times, sample_uniform
from lightning_cp.training.state import TrainState

__all__ = [
    "ClassTokens",
    "FlowBatch",
    "FlowMatching",
    "FluxDenoiser",
    "LoopSettings",
    "StepReport",
    "Steps",
    "TrainState",
    "WanDenoiser",
    "Watcher",
    "WeightAverage",
    "sample_dropped",
    "sample_noise",
    "sample_times",
    "sample_uniform",
]
