"""Encode a small folder of media at the start of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

_POLL_S = 0.5


def encoded_folder(config: DictConfig) -> Path:
    """Encode `data.path` into the run's folder on rank 0, and return the cache's folder on every rank.

    The other ranks wait; if rank 0 fails, the launcher ends them.
    """
    folder = Path(config.run_dir) / "latents"
    if int(os.environ.get("RANK", "0")):
        while not (folder / "complete.json").is_file():
            time.sleep(_POLL_S)
        return folder
    from lightning_cp.precompute import PrecomputeSettings, precompute

    sizes = None if config.data.sizes is None else OmegaConf.to_container(config.data.sizes)
    frames = OmegaConf.to_container(config.data.frames) if OmegaConf.is_list(config.data.frames) else config.data.frames
    settings = PrecomputeSettings(
        captions=config.data.captions,
        sizes=sizes,  # type: ignore[arg-type]
        frames=frames,  # type: ignore[arg-type]
        fps=config.data.fps,
        dtype=torch.bfloat16,
    )
    device = torch.device("cuda" if config.accelerator == "cuda" else "cpu")
    result = precompute(
        config.model.pretrained,
        Path(config.data.path),
        folder,
        settings=settings,
        device=device,
        progress=config.progress,
    )
    for skipped in result.skipped[:10]:
        print(f"skipped: {skipped.reason}", flush=True)
    return folder
