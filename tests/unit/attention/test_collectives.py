"""With equal shards, an attention call makes as many calls of torch.distributed at 16 ranks as at 2."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.comm import transfer
from lightning_cp.compat.torch_names import fake_world


def _calls(ranks: int, lengths: list[int], **degrees: Any) -> tuple[Counter[str], Counter[str]]:
    """Calls in forward, and in forward and backward."""
    found: Counter[str] = Counter()

    def counted(owner: Any, name: str, shown: str = "") -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found[shown or name] += 1
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    with fake_world(ranks):
        q, k, v = (torch.randn(1, lengths[0], 32, 8, requires_grad=True) for _ in range(3))
        config = ContextParallelConfig(**degrees)
        settings: dict[str, Any] = {"parallel_config": config, "q_lengths": lengths, "kv_lengths": lengths}
        context_parallel_attention(q, k, v, **settings)  # builds the groups
        with (
            counted(dist, "all_to_all_single"),
            counted(dist, "batch_isend_irecv"),
            counted(transfer, "all_gather_tensor", "all_gather"),
        ):
            out = context_parallel_attention(q, k, v, **settings)
            forward = Counter(found)
            out.sum().backward()
    return forward, found


@pytest.mark.parametrize("ranks", [2, 16])
def test_calls_do_not_grow_with_the_ranks(ranks: int) -> None:
    equal = [4] * ranks
    assert _calls(ranks, equal, ulysses_degree=ranks) == ({"all_to_all_single": 2}, {"all_to_all_single": 4})
    ring = ({"all_gather": 1}, {"all_gather": 2, "all_to_all_single": 1})
    assert _calls(ranks, equal, ring_degree=ranks) == ring


def test_unequal_shards_of_ulysses_are_one_collective_too() -> None:
    lengths = [5, 3, 4, 4]
    assert _calls(4, lengths, ulysses_degree=4) == ({"all_to_all_single": 2}, {"all_to_all_single": 4})
    forward, both = _calls(4, lengths, ring_degree=4)
    assert forward == {"batch_isend_irecv": 1}
    assert both == {"batch_isend_irecv": 2, "all_to_all_single": 1}
