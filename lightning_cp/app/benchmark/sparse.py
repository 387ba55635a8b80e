"""Workload `sparse`: attention with sparse masks, in one process and with a ring that sends only the needed keys."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from lightning_cp.app.benchmark.subject import ONE_THREAD, UNMASKED, Subject
from lightning_cp.app.benchmark.workloads import attention_step, shards
from lightning_cp.attention import context_parallel_attention
from lightning_cp.attention.sparse import SparseMask, balanced_order, imbalance
from lightning_cp.config import ContextParallelConfig

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


def sparse(config: DictConfig, device: torch.device) -> list[Subject]:
    """List the subjects: attention without a mask in one process and as a ring, then the ring with each mask.

    With each mask, tokens are divided in their order, and in the order of `balanced_order` if that differs.
    Args: config: the section `sparse`.
    """
    world, tokens = dist.get_world_size(), config.tokens
    lengths, own = shards(tokens)
    step_of = functools.partial(attention_step, config, tokens, device)

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
