"""Samples of a trained flow: integration with guidance, sampling on all ranks, reading and drawing the result."""

from lightning_cp.sampling.album import Album
from lightning_cp.sampling.draw import Samples, SamplingSettings, draw_samples
from lightning_cp.sampling.media import frames_of, write_sample
from lightning_cp.sampling.ode import integrate_flow
from lightning_cp.sampling.picture import draw_grid
from lightning_cp.sampling.recognise import Recognition, recognise_digits
from lightning_cp.sampling.show import SamplePictures
from lightning_cp.sampling.trained import SharedGuidance, WithPrecision, load_denoiser

__all__ = [
    "Album",
    "Recognition",
    "SamplePictures",
    "Samples",
    "SamplingSettings",
    "SharedGuidance",
    "WithPrecision",
    "draw_grid",
    "draw_samples",
    "frames_of",
    "integrate_flow",
    "load_denoiser",
    "recognise_digits",
    "write_sample",
]
