"""Samples of a trained flow: integration with guidance, sampling on all ranks, reading and drawing the result."""

from lightning_cp.sampling.draw import Samples, SamplingSettings, draw_samples
from lightning_cp.sampling.ode import integrate_flow
from lightning_cp.sampling.picture import draw_grid
from lightning_cp.sampling.recognise import Recognition, recognise_digits
from lightning_cp.sampling.show import SamplePictures

__all__ = [
    "Recognition",
    "SamplePictures",
    "Samples",
    "SamplingSettings",
    "draw_grid",
    "draw_samples",
    "integrate_flow",
    "recognise_digits",
]
