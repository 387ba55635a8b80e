"""Draw samples of a flow model on all ranks: integrate the flow, split samples over ranks, tile them in a picture."""

from lightning_cp.sampling.draw import Samples, SamplingSettings, draw_samples
from lightning_cp.sampling.ode import integrate_flow

__all__ = ["Samples", "SamplingSettings", "draw_samples", "integrate_flow"]
