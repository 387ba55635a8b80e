"""Make tiny pipeline folders, pictures and clips with captions, and their latent caches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lightning_cp.precompute import PrecomputeSettings, precompute
from tests.e2e.recipe import ROOT
from tests.families.cases import CASES, made
from tests.harness import warm
from tests.unit.finetune.media.encode import write_video


def frames_of(number: int, size: tuple[int, int, int]) -> list[NDArray[np.uint8]]:
    """Draw the frames of one clip: waves that move; a different one for each number."""
    count, height, width = size
    y, x = np.mgrid[0:height, 0:width]
    channels = [
        (
            128 + 100 * np.sin((x + k) / (3 + number)),
            128 + 100 * np.cos(y / (2 + number)),
            np.full((height, width), 40.0 * number % 256),
        )
        for k in range(count)
    ]
    return [np.stack(frame, axis=-1).clip(0, 255).astype(np.uint8) for frame in channels]


def write_media(folder: Path, case: str, count: int) -> Path:
    """Write pictures, or clips if the case has several frames: each with a caption, and a reference for edits."""
    size = CASES[case].size
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        frames = frames_of(i, size)
        if size[0] == 1:
            Image.fromarray(frames[0]).save(folder / f"{i}.png")
        else:
            write_video(folder / f"{i}.mp4", frames)
        (folder / f"{i}.txt").write_text(f"wave number {i}\n")
        if len(CASES[case].reference or ()) == 3:
            write_video(folder / f"{i}.reference.mp4", frames_of(i + 7, size))
        elif CASES[case].reference is not None:
            Image.fromarray(frames_of(i + 7, size)[0]).save(folder / f"{i}.reference.png")
    return folder


def write_pipeline(folder: Path, case: str) -> Path:
    """Save the pipeline of a case."""
    made(case).save_pretrained(str(folder))
    return folder


def write_cache(
    folder: Path,
    case: str,
    count: int = 6,
    *,
    write: Callable[[Path, str, int], Path] = write_media,
    fps: float | None = None,
) -> Path:
    """Write a folder with `pipe`, `media` and `latents`, the cache of the media.

    Args: write: writes the media. fps: frame rate of clips; None: the files' own.
    """
    pipe, media = write_pipeline(folder / "pipe", case), write(folder / "media", case, count)
    frames, height, width = CASES[case].size
    settings = PrecomputeSettings(
        sizes=[[height, width]],
        frames=None if frames == 1 else frames,
        dtype=torch.float32,
        sheet=0,
        max_upscale=2,
        fps=fps,
    )
    result = precompute(pipe, media, folder / "latents", settings=settings, device=torch.device("cpu"), progress=False)
    assert not result.skipped, result.skipped
    assert result.encoded == count
    return folder


def run_recipe(name: str, folder: Path, *overrides: str) -> None:
    """Run a recipe in a folder, on the CPU, without a failure."""
    command = [sys.executable, str(ROOT / f"recipes/{name}.py"), *overrides, "accelerator=cpu", "progress=false"]
    ran = warm.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=folder, timeout=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr
