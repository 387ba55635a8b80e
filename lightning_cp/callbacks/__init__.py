"""Callbacks for Lightning's Trainer."""

from lightning_cp.callbacks.ema import EMACallback
from lightning_cp.callbacks.sampling import SamplingCallback, StepMetrics

__all__ = ["EMACallback", "SamplingCallback", "StepMetrics"]
