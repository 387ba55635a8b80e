"""Pictures and clips with captions, and folders of tiny pipelines, for the tests of precompute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lightning_cp.latent_cache import LatentCache
from lightning_cp.precompute import EncodingRanks, Precomputed, PrecomputeSettings, precompute
from tests.families.cases import made
from tests.unit.finetune.latent_cache.made import bits
from tests.unit.finetune.media.encode import write_video

CPU = torch.device("cpu")
PICTURES: dict[str, Any] = {"sizes": [[16, 24], [24, 16]], "dtype": torch.float32, "sheet": 0}
CLIPS: dict[str, Any] = {"sizes": [[32, 48]], "frames": 5, "dtype": torch.float32, "sheet": 0}


def pipeline(folder: Path, case: str = "flux") -> Path:
    """Save a tiny pipeline."""
    made(case).save_pretrained(str(folder))
    return folder


def pixels(seed: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """A smooth picture, uint8 [h, w, 3]."""
    coarse = np.random.default_rng(seed).integers(0, 255, (3, 4, 3), dtype=np.uint8)
    return np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def pictures(folder: Path, count: int = 7) -> Path:
    """Write pictures of two shapes; every third has a second caption."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        height, width = (32, 48) if i % 2 else (48, 32)
        Image.fromarray(pixels(i, height, width)).save(folder / f"p{i}.png")
        (folder / f"p{i}.txt").write_text(f"picture {i % 4}\n" + ("another text\n" if i % 3 == 0 else ""))
    return folder


def clips(folder: Path, count: int = 3, frames: int = 7) -> Path:
    """Write clips that move."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        first = pixels(i, 48, 64)
        write_video(folder / f"v{i}.mp4", [np.roll(first, 3 * t, axis=1) for t in range(frames)])
        (folder / f"v{i}.txt").write_text(f"clip {i % 2}\n")
    return folder


def encoded(
    pipe: Path, data: Path, output: Path, settings: dict[str, Any], ranks: EncodingRanks | None = None
) -> Precomputed:
    """Precompute on the CPU."""
    return precompute(
        str(pipe), data, output, settings=PrecomputeSettings(**settings), device=CPU, ranks=ranks, progress=False
    )


def contents(folder: Path) -> dict[str, Any]:
    """Return everything that training reads: each row without its shard, and every bit of its tensors."""
    cache = LatentCache(folder)
    cache.verify()
    found: dict[str, Any] = {"": bits(cache.empty_text)}
    for i, row in enumerate(cache.rows):
        facts = [row.source, row.source_hash, row.frames, row.height, row.width, row.tokens, row.captions, row.fps]
        tensors = [bits(cache.sample(i, caption=k)) for k in range(len(row.captions))]
        found[row.id] = (facts, row.crop, row.repeats, tensors)
    return found
