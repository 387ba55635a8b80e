"""Check that a file format of samples can be written. Imports neither torch nor diffusers."""

import importlib.util

from lightning_cp.errors import MediaError


def check_format(format: str) -> None:
    """Check that the packages of a format are installed. Raises: MediaError: mp4 without imageio and ffmpeg."""
    if format == "mp4" and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise MediaError("format=mp4 needs imageio and ffmpeg: pip install 'imageio[ffmpeg]', or use format=gif")


def check_sound_format() -> None:
    """Check that a clip can be written with its sound. Raises: MediaError: PyAV is not installed."""
    if importlib.util.find_spec("av") is None:
        raise MediaError(
            "a clip with sound needs PyAV: pip install av, or use format=gif, which writes the sound to another file"
        )
