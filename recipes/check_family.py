"""Check a model family: prove that training feeds the transformer as the pipeline does when it samples.

    lightning-cp check-family pretrained=my-pipeline

docs/families.md explains the four proofs. `--help` lists the settings. The exit code is 1 if a proof fails.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from lightning_cp.pipeline_folder import check_source
from lightning_cp.recipes import terminal
from lightning_cp.recipes.runs.command import command
from lightning_cp.recipes.runs.ranks import on_ranks, run_on_ranks
from lightning_cp.recipes.terminal import print_error, rich_text

_DTYPES = ("float32", "bfloat16")


@on_ranks
def topology(config: DictConfig) -> Iterator[dict[str, Any]]:
    """Run the topology proof on every rank. The row is the worst proof of a model."""
    from torch.distributed import get_world_size

    from lightning_cp.config import ContextParallelConfig
    from lightning_cp.finetune.families import collate
    from lightning_cp.finetune.family_check import store, topology_proof, training_models

    pipe, family, media = _prepare(config)
    stored = collate(store(family, pipe, list(config.captions), media), family.text)
    ring = ContextParallelConfig(ring_degree=get_world_size())
    proofs = [topology_proof(x, family, stored, ring) for x in training_models(pipe, family)]
    yield asdict(max(proofs, key=lambda proof: proof.error))


def run(config: DictConfig) -> int:
    """Run all proofs and print a table. Returns: the exit code."""
    problem = _problem(config)
    if problem is not None:
        print_error(problem)
        return 2
    from lightning_cp.finetune.family_check import Proof, check_family

    try:
        pipe, family, media = _prepare(config)
        report = check_family(pipe, list(config.captions), media, family=family, negative=config.negative)
    except ValueError as error:
        print_error(" ".join(str(error).split()))
        return 2
    proofs, name = list(report.proofs), f"{report.pipeline}: family {report.family}"
    del pipe
    if config.ranks > 1:
        rows, result = run_on_ranks(topology, config, config.ranks, limit_s=config.limit_s, threads=0)
        if result.failure is not None:
            print_error(result.failure.describe())
            return result.exit_code
        proofs += [Proof(**row) for row in rows]
    _show(name, proofs)
    return 0 if all(proof.passed for proof in proofs) else 1


def _prepare(config: DictConfig) -> tuple[Any, Any, dict[str, Any]]:
    """Load the pipeline and make random media of the configured size, on the 8-bit grid."""
    import torch

    from lightning_cp.finetune.families import family_for
    from lightning_cp.finetune.pipeline import load_pipeline

    pipe = load_pipeline(str(config.pretrained), getattr(torch, config.dtype), setting="pretrained")
    pipe.set_progress_bar_config(disable=True)
    family = family_for(pipe)
    grid = family.grid
    height, width = (config[name] or 8 * grid.pixels for name in ("height", "width"))
    frames = config.frames or max(2 * grid.frame_step + grid.least_frames, family.least_sampled)
    grid.check(height=height, width=width, frames=frames)
    generator = torch.Generator().manual_seed(0)
    size = (len(config.captions), 3, frames, height, width)
    pixels = torch.randint(256, size, generator=generator).float() / 255 * 2 - 1
    reference = pixels if family.reference_clips else pixels[:, :, :1]
    return pipe, family, {"pixels": pixels, "reference": reference.flip(-1)}


def _problem(config: DictConfig) -> str | None:
    """Return what is wrong with the settings; None if nothing is."""
    if OmegaConf.is_missing(config, "pretrained"):
        return "pretrained=<folder of a pipeline> must be given, see --help"
    if config.dtype not in _DTYPES:
        return f"dtype={config.dtype} must be one of {', '.join(_DTYPES)}"
    if not isinstance(config.ranks, int) or config.ranks < 1:
        return f"ranks={config.ranks} must be 1 or more"
    if not OmegaConf.is_list(config.captions) or len(config.captions) < 2:
        return f"captions={config.captions} must be a list of two captions or more"
    try:
        check_source(str(config.pretrained), "pretrained")
    except ValueError as error:
        return str(error)
    return None


def _show(title: str, proofs: list[Any]) -> None:
    console = terminal.console()
    table = Table(title=rich_text(title), title_justify="left")
    for column in ("proof", "error", "tolerance", "result", "largest difference"):
        table.add_column(column, justify="right" if column in ("error", "tolerance") else "left")
    for proof in proofs:
        result = "passed" if proof.passed else "[red]failed[/]"
        table.add_row(proof.name, f"{proof.error:.1e}", f"{proof.tolerance:.0e}", result, rich_text(proof.found))
    console.print(table)


@command("check_family", "check_family")
def main(config: DictConfig) -> None:
    """Check the settings, run the proofs, and exit with their result."""
    code = run(config)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
