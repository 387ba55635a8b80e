"""Attention with sparse masks, in one process and with a ring that sends only the needed keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from lightning_cp.attention import context_parallel_attention
from lightning_cp.attention.sparse import SparseMask, balanced_order, imbalance
from lightning_cp.config import ContextParallelConfig
from lightning_cp.recipes.benchmarks.measure import Figures, measure_subjects
from lightning_cp.recipes.benchmarks.ranks import check_device, check_integers, device_of, rows_on_ranks
from lightning_cp.recipes.benchmarks.report import LIMIT, MEDIAN, MS, SENT, SPREAD, Column, Row, publish, rows_of, show
from lightning_cp.recipes.benchmarks.subject import ONE_THREAD, Subject
from lightning_cp.recipes.benchmarks.workloads import attention_step, shards
from lightning_cp.recipes.runs.ranks import on_ranks

UNMASKED = "ring, no mask"
_COLUMNS = (
    *(Column("area", "work"), MS, LIMIT, MEDIAN, SPREAD, SENT),
    Column("of the ring", "sent_share", 100, ".0f", " %"),
    Column("imbalance", "imbalance"),
)
_ABOUT = """
Forward and backward of attention with a sparse mask. *Area* is the share of the pairs of a query and a key that the
mask allows. The limit is *area* times the time without a mask in one process on one thread, divided by the number of
ranks. *Of the ring* is the number of bytes sent, as a share of those of the ring without a mask. *Imbalance* is the
work of the busiest rank relative to the mean, counted in whole blocks.
"""
_FRAMES = (5, 3, 1, 7)  # length of each document, in frames, again and again
_PARTS = 4  # of a frame, in `_radial`; each is a block


def _documents(tokens: int, frame: int, block: int) -> SparseMask:
    """Packed samples with whole blocks."""
    lengths = torch.tensor(_FRAMES * (tokens // (sum(_FRAMES) * frame) + 1)) * frame
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    return SparseMask.from_documents(ids[:tokens], block_size=block)


def _cut_documents(tokens: int, frame: int, block: int) -> SparseMask:
    """Packed samples that end within blocks: all lengths are 7/8 of those of `_documents`."""
    return _documents(tokens, frame * 7 // 8, block)


def _frames(tokens: int, frame: int, block: int) -> SparseMask:
    """Block-causal video: a frame attends to itself and to earlier frames."""
    return SparseMask.from_mask_mod(lambda b, h, q, k: q // frame >= k // frame, tokens, block_size=block)


def _window(tokens: int, frame: int, block: int) -> SparseMask:
    """Sliding tile attention: a tile attends to tiles at a distance of at most 2."""
    return SparseMask.from_mask_mod(lambda b, h, q, k: (q // frame - k // frame).abs() <= 2, tokens, block_size=block)


def _radial(tokens: int, frame: int, block: int) -> SparseMask:
    """Radial attention: the more frames between two tokens, the closer their places in the frame must be."""

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q, k = q // block, k // block
        frames = (q // _PARTS - k // _PARTS).abs().clamp(max=2)
        return (q % _PARTS - k % _PARTS).abs() < _PARTS >> frames

    return SparseMask.from_mask_mod(near, tokens, block_size=block)


MASKS: dict[str, Callable[[int, int, int], SparseMask]] = {
    "documents": _documents,
    "cut documents": _cut_documents,
    "frames": _frames,
    "window": _window,
    "radial": _radial,
}


def check_settings(config: DictConfig) -> str:
    """Check the settings. Returns: what is wrong; "" if nothing is."""
    sizes = (config.attention.tokens, config.frame, *config.blocks)
    if not all(isinstance(x, int) and x >= 8 for x in sizes):
        return f"attention.tokens, frame and blocks must be integers of at least 8; got {list(sizes)}"
    return check_integers(config, ranks=2) or check_device(config, max(config.ranks))


def run(config: DictConfig, folder: Path) -> None:
    """Measure in one process, then with each number of ranks, and show the results."""
    rows: list[Row] = []
    for ranks in (1, *config.ranks):
        found = rows_on_ranks(measure, config, ranks, folder)
        show(found, _COLUMNS)
        rows += found
    publish(rows, _COLUMNS, folder, config.page, about=_ABOUT)


@on_ranks
def measure(config: DictConfig) -> Iterator[Row]:
    """Measure the masks on this rank, and yield the rows."""
    device, world = device_of(config), dist.get_world_size()
    subjects = sparse(config, device)
    figures = measure_subjects(subjects, repeats=config.repeats, seconds=config.seconds, device=device)
    yield from sparse_rows(config.attention.tokens, world, figures, subjects)


def sparse_rows(tokens: int, ranks: int, figures: dict[str, Figures], subjects: list[Subject]) -> list[Row]:
    """Return the rows: with the area of the mask and the bytes sent, as a share of those of a ring without a mask."""
    full_bytes = figures[UNMASKED].sent_bytes if UNMASKED in figures else None
    rows = rows_of("sparse", tokens, ranks, figures)
    for row, subject in zip(rows, subjects, strict=True):
        row["work"] = subject.work
        if subject.imbalance is not None:
            row["imbalance"] = subject.imbalance
        if full_bytes and "sent_bytes" in row:
            row["sent_share"] = row["sent_bytes"] / full_bytes
    return rows


def sparse(config: DictConfig, device: torch.device) -> list[Subject]:
    """List the subjects: attention without a mask in one process and as a ring, then the ring with each mask.

    With each mask, tokens are divided in their order, and in the order of `balanced_order` if that differs.
    """
    world, tokens = dist.get_world_size(), config.attention.tokens
    lengths, own = shards(tokens)
    step_of = functools.partial(attention_step, config.attention, tokens, device)

    def ring(mask: SparseMask | None) -> Callable[[], object]:
        settings = {"parallel_config": ContextParallelConfig(ring_degree=world), "block_mask": mask}
        attend = functools.partial(context_parallel_attention, **settings, q_lengths=lengths, kv_lengths=lengths)
        return step_of(attend, lambda x: x[:, own])

    def alone() -> Callable[[], object]:
        return step_of(functools.partial(context_parallel_attention, parallel_config=ContextParallelConfig()))

    subjects = [Subject(ONE_THREAD, alone, rank_zero_only=True, threads=1)]
    subjects += [Subject(UNMASKED, functools.partial(ring, None))] if world > 1 else []
    for name, block in ((name, block) for name in MASKS for block in config.blocks):
        mask = MASKS[name](tokens, config.frame, block)
        order = balanced_order(mask, world)
        divided = {f"{name}, blocks of {block}": mask}
        if order is not None:
            divided[f"{name}, blocks of {block}, balanced"] = mask.in_order(order)
        share = _share_of_pairs(mask)
        for title, ordered in divided.items():
            subjects.append(
                Subject(title, functools.partial(ring, ordered), work=share, imbalance=imbalance(ordered, lengths))
            )
    return subjects


def _share_of_pairs(mask: SparseMask) -> float:
    """Return the share of pairs of a query and a key that the mask allows."""
    zero, (queries, keys) = torch.zeros(1, 1, dtype=torch.int64), mask.lengths
    rows = torch.split(torch.arange(queries)[:, None], 64)
    allowed = sum(int(mask.visible(zero, zero, row, torch.arange(keys)).sum()) for row in rows)
    return allowed / (queries * keys)
