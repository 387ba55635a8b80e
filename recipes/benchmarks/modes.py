"""Compare one process, every mode of this library and diffusers: attention, a training step and a sampling step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig

from lightning_cp.recipes.benchmarks.links import check_links
from lightning_cp.recipes.benchmarks.measure import Figures, measure_subjects
from lightning_cp.recipes.benchmarks.plots import draw_workload
from lightning_cp.recipes.benchmarks.ranks import check_device, check_integers, device_of, rows_on_ranks
from lightning_cp.recipes.benchmarks.report import LIMIT, MEDIAN, MS, SENT, SPREAD, Column, Row, publish, rows_of, show
from lightning_cp.recipes.benchmarks.subject import UNCHECKED
from lightning_cp.recipes.runs.ranks import on_ranks

WORKLOADS = ("attention", "one_rank", "training", "sampling")
_COLUMNS = (
    *(MS, LIMIT, MEDIAN, SPREAD),
    Column("peak MB a rank", "peak_bytes", 1e-6, ".1f"),
    SENT,
    Column("exchanges", "exchanges", 1, ".0f"),
    Column("waiting", "waited", 100, ".0f", " %"),
    Column("peer check", "check_cost", 100, "+.1f", " %", missing=""),
)
_ABOUT = """
*ms* is the time of the slowest rank in the fastest repetition; repetitions of all rows are interleaved. *× limit* is
this time as a multiple of the limit: the time of one process on one thread (one GPU), divided by the number of ranks.
*Median* is the same multiple for the medians. *Spread* is the interquartile range of the repetitions, divided by the
median; in the plots, times with a spread above 30 % have hollow markers. *Peak* is the largest memory that a step
allocates in addition to what was allocated before. *Waiting* is the fraction of a step in which a rank's thread waits
for a transfer, because communication is not overlapped or because ranks differ in speed (on GPUs: in which only NCCL's
kernels run, in one traced step). *Peer check* is the fraction of a step that the comparison of arguments between ranks
(`check_peers`) takes: the median over pairs of repetitions with and without it.

*One call* is what a rank computes in a single attention call without communication: its queries with all keys, or its
heads with all tokens. In *attention*, all ranks compute at the same time, so a value above 1 is the cost of sharing
cores, caches and memory. *One_rank* is what the first rank computes while no other rank runs, with simulated transfers.
The difference to the rows *one call* is our overhead.
"""


def check_settings(config: DictConfig) -> str:
    """Check the settings. Returns: what is wrong; "" if nothing is."""
    if not config.workloads or any(name not in WORKLOADS for name in config.workloads):
        return f"workloads={list(config.workloads)} is not valid: must be some of {', '.join(WORKLOADS)}"
    if problem := check_links(config.get("link_mbit")) or check_integers(config, ranks=2, attention__lengths=1):
        return problem
    if not {"training", "sampling"}.isdisjoint(config.workloads) and "model" not in config:
        return f"workloads={list(config.workloads)}: these settings have no model; use bench=cpu or bench=four_gpus"
    return check_device(config, 1 if list(config.workloads) == ["one_rank"] else max(config.ranks))


def run(config: DictConfig, folder: Path) -> None:
    """Measure with each number of ranks in turn and show the results."""
    together = [name for name in config.workloads if name != "one_rank"]
    jobs = [(ranks, 0, together) for ranks in config.ranks if together]
    jobs += [(1, ranks, ["one_rank"]) for ranks in config.ranks if "one_rank" in config.workloads]
    rows: list[Row] = []
    for ranks, simulated, names in jobs:
        found = rows_on_ranks(measure, config, ranks, folder, workloads=names, simulated_ranks=simulated)
        show(found, _COLUMNS)
        rows += found
    pictures = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        pictures.append(folder / f"bench_{name}.png")
        draw_workload([row for row in rows if row["workload"] == name], pictures[-1])
    publish(rows, _COLUMNS, folder, config.page, about=_ABOUT, pictures=pictures)


@on_ranks
def measure(config: DictConfig) -> Iterator[Row]:
    """Measure the workloads on this rank, and yield the rows."""
    from lightning_cp.recipes.benchmarks import workloads

    device, world = device_of(config), dist.get_world_size()
    for name in (name for name in WORKLOADS if name in config.workloads):
        work = getattr(workloads, name)
        sets = [(config.tokens, partial(work, config, device))] if name in ("training", "sampling") else []
        if not sets:
            sets = [(n, partial(work, config.attention, n, device)) for n in config.attention.lengths]
        for length, subjects_of in sets:
            subjects = [x for x in subjects_of() if config.peers or not x.is_peer]
            traces = Path(config.folder) / "traces" / f"{name}_{length}_{world}"
            figures = measure_subjects(
                subjects, repeats=config.repeats, seconds=config.seconds, device=device, traces=traces
            )
            yield from with_check_cost(rows_of(name, length, world, figures), figures)


def with_check_cost(rows: list[Row], figures: dict[str, Figures]) -> list[Row]:
    """Add the fraction of a step that the comparison of arguments between ranks takes.

    It is the median over pairs of repetitions that ran in turn, so with equal other load.
    """
    for row in rows:
        checked, unchecked = figures[row["subject"]], figures.get(row["subject"] + UNCHECKED)
        if unchecked is not None and checked.times_s and unchecked.times_s:
            pairs = zip(checked.times_s, unchecked.times_s, strict=True)
            row["check_cost"] = statistics.median(a / b for a, b in pairs) - 1
    return rows
