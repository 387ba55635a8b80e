"""Encode a small folder of media at the start of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from lightning_cp.errors import DataError
from lightning_cp.launch.rank import launcher_env
from lightning_cp.recipes.settings.data_folders import data_folders
from lightning_cp.recipes.terminal import printable

_POLL_S = 0.5


def _rank_and_folder(run_dir: str) -> tuple[int, Path]:
    """Return this rank and rank 0's run folder: with another launcher, ranks compose names with different times."""
    if dist.is_initialized():
        run_dirs = [run_dir]
        dist.broadcast_object_list(run_dirs, src=0)
        return dist.get_rank(), Path(run_dirs[0])
    slurm = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
    if "TORCHELASTIC_RUN_ID" in os.environ or launcher_env(slurm) is not None:
        raise DataError(
            "data=folder with trainer=lightning cannot be started by torchrun or SLURM: encode the folder with "
            "lightning-cp precompute and use data=latents, or use trainer=fabric"
        )
    return int(os.environ.get("RANK", "0")), Path(run_dir)


def encoded_folder(config: DictConfig) -> Path:
    """Encode `data.path` into the run's folder on rank 0, and return the cache's folder on every rank.

    The other ranks wait; if rank 0 fails, the launcher ends them.

    Raises: DataError: another launcher started the ranks, and they cannot agree on a folder yet (Trainer).
    """
    rank, run_folder = _rank_and_folder(config.run_dir)
    folder = run_folder / "latents"
    if rank:
        while not (folder / "contents.json").is_file():
            time.sleep(_POLL_S)
        return folder
    from lightning_cp.finetune.media import DataFolder
    from lightning_cp.finetune.precompute import PrecomputeSettings, precompute
    from lightning_cp.finetune.precompute.run import SKIPPED

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
        [DataFolder.of(one) for one in data_folders(config)],
        folder,
        settings=settings,
        device=device,
        progress=config.progress,
    )
    if result.changed or result.dropped:
        print(
            f"{printable(config.data.path)} has changed since an earlier run stored it: {result.changed} samples have "
            f"other contents, {result.dropped} are gone; {result.encoded} were encoded now, {result.stored} kept",
            flush=True,
        )
    for skipped in result.skipped[:10]:
        print(f"skipped: {printable(skipped, keep='')}", flush=True)
    if len(result.skipped) > 10:
        print(printable(f"… and {len(result.skipped) - 10} more, see {folder / SKIPPED}"), flush=True)
    return folder
