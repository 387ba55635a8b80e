"""Callbacks for Lightning's Trainer."""

from lightning_cp.callbacks.ema import EMACallback
from lightning_cp.callbacks.metrics import StepMetrics
from lightning_cp.callbacks.sampling import SamplingCallback

__all__ = ["EMACallback", "SamplingCallback", "StepMetrics"]
