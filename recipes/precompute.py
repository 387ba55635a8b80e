"""Encode a data set of pictures or videos once, so that fine-tuning needs neither the VAE nor the text encoders.

    lightning-cp precompute model.pretrained=my-pipeline data.path=clips output=latents
    lightning-cp precompute … 'precompute.sizes=[[480,832]]' precompute.frames=81 devices=8

It starts the ranks itself, and continues where an interrupted run stopped. `--help` lists the settings.
"""

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from lightning_cp.launch.rendezvous import init_process_group
from lightning_cp.recipes import terminal
from lightning_cp.recipes.runs.command import command, reads_settings
from lightning_cp.recipes.runs.precompute import check_precompute
from lightning_cp.recipes.runs.recipe import run_recipe
from lightning_cp.recipes.settings.data_folders import data_folders
from lightning_cp.recipes.terminal import rich_text


@reads_settings
def encode(config: DictConfig) -> None:
    """Encode this rank's share on every rank; rank 0 reports. (The launching process needs none of these imports.)"""
    from datetime import timedelta

    import torch

    from lightning_cp.finetune.media import DataFolder
    from lightning_cp.finetune.precompute import EncodingRanks, PrecomputeSettings, precompute, rank_device

    device = rank_device(config.accelerator, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        init_process_group(backend, timeout=timedelta(days=2))  # ranks wait for the slowest one at the end
    chosen: Any = OmegaConf.to_container(config.precompute)
    settings = PrecomputeSettings(captions=config.data.captions, workers=config.num_workers, **chosen)
    ranks = EncodingRanks.of_world(settings.vae_ranks)
    result = precompute(
        config.model.pretrained,
        [DataFolder(**folder) for folder in data_folders(config)],
        Path(config.output),
        settings=settings,
        device=device,
        ranks=ranks,
        progress=config.progress,
    )
    if ranks.rank == 0:
        report_precomputed(result, Path(config.output))


def report_precomputed(result: object, output: Path) -> None:
    """Print what happened to every file."""
    from lightning_cp.finetune.latent_cache import LatentCache
    from lightning_cp.finetune.precompute import Precomputed

    assert isinstance(result, Precomputed), "the result of precompute"
    cache = LatentCache(output)
    console = terminal.console()
    console.print(
        f"{rich_text(output)}: {len(cache)} samples, {result.captions} captions", highlight=False, soft_wrap=True
    )
    table = Table()
    for column in ("media", "number"):
        table.add_column(column, justify="left" if column == "media" else "right")
    for name, number in (
        ("found", result.found),
        ("encoded by this run", result.encoded),
        ("stored before", result.stored),
        ("skipped", len(result.skipped)),
        ("changed since they were stored", result.changed),
        ("no longer in the data", result.dropped),
        ("captions encoded by this run", result.encoded_captions),
    ):
        table.add_row(name, str(number))
    sizes = [(row.frames, row.height, row.width) for row in cache.rows]
    for frames, height, width in sorted(set(sizes)):
        table.add_row(f"  {frames} × {height} × {width}", str(sizes.count((frames, height, width))))
    console.print(table)
    for one in result.skipped[:10]:
        console.print(f"skipped: {rich_text(one)}", highlight=False, soft_wrap=True)
    if len(result.skipped) > 10:
        console.print(
            f"… and {len(result.skipped) - 10} more, see {rich_text(output / 'skipped.jsonl')}", soft_wrap=True
        )


@command("precompute", "precompute")
def main(config: DictConfig) -> float | None:
    """Check the settings and start the ranks."""
    return run_recipe(config, encode, check=check_precompute)


if __name__ == "__main__":
    main()
