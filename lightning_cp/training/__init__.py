"""Parts of training loops: EMA weights, random draws that are equal within a context group, checks for NaN and inf."""

from lightning_cp.training.ema import WeightAverage
from lightning_cp.training.finite import StepGuard, find_nonfinite
from lightning_cp.training.noise import sample_dropped, sample_noise, sample_times, sample_uniform

__all__ = [
    "StepGuard",
    "WeightAverage",
    "find_nonfinite",
    "sample_dropped",
    "sample_noise",
    "sample_times",
    "sample_uniform",
]
