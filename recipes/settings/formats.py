"""Check that a file format of samples can be written. Imports neither torch nor diffusers."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lightning_cp.compat.versions import needs
from lightning_cp.errors import MediaError


def check_format(format: str) -> None:
    """Check that the packages of a format are installed. Raises: MediaError: mp4 without imageio and ffmpeg."""
    if format == "mp4" and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise MediaError("format=mp4 needs imageio and ffmpeg: pip install 'imageio[ffmpeg]', or use format=gif")


def check_clip_format(format: str, call: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    """Check that a format can hold what a pipeline will draw. Args: inputs: arguments of the call.

    Raises: MediaError: png for clips.
    """
    parameter = inspect.signature(call).parameters.get("num_frames")
    frames = inputs.get("num_frames", None if parameter is None else parameter.default)
    if format == "png" and isinstance(frames, int) and frames > 1:
        raise MediaError(
            f"format=png holds one picture, but the pipeline draws clips of num_frames={frames}: use gif, mp4 or auto, "
            "or set call.num_frames=1"
        )


def check_sound_format() -> None:
    """Check that a clip can be written with its sound. Raises: MediaError: PyAV is not installed."""
    if importlib.util.find_spec("av") is None:
        raise MediaError(
            f"{needs('a clip with sound', 'av')}, or use format=gif, which writes the sound to another file"
        )
