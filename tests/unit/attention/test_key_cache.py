"""The cache of keys by chunk: what it keeps, where it writes, and what it refuses. Ranks are simulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallelConfig, KeyCache, context_parallel_attention
from lightning_cp.attention import key_cache as module
from lightning_cp.errors import ShapeError
from lightning_cp.mesh.groups import SINGLE_RANK

TOKENS = (7, 5, 2, 9, 7, 7, 4, 6)  # of each chunk; ranks have different numbers, or none


@contextmanager
def as_rank(rank: int, ring: int) -> Iterator[ContextParallelConfig]:
    """Make caches for one rank of a ring, without a process group."""
    groups = replace(SINGLE_RANK, context_shape=(ring, 1), context_rank=rank)
    with mock.patch.object(module, "groups_for", return_value=groups):
        yield ContextParallelConfig(ring_degree=ring)


def keys_of(chunk: int, sizes: list[int], rank: int) -> Tensor:
    """Keys that hold their position in the sequence."""
    start = sum(TOKENS[:chunk]) + sum(sizes[:rank])
    return torch.arange(start, start + sizes[rank], dtype=torch.float64)[None, :, None, None].expand(2, -1, 3, 4)


def shard(tokens: int, ring: int) -> list[int]:
    return [(tokens + ring - 1 - rank) // ring for rank in range(ring)]


@pytest.mark.parametrize("settings", [{}, {"window": 2}, {"window": 2, "sinks": 1}, {"window": 1, "sinks": 2}])
@pytest.mark.parametrize("keep_grad", [False, True])
@pytest.mark.parametrize("with_grad", [False, True])
def test_each_rank_keeps_its_shard_of_the_chunks_in_the_window(
    settings: dict[str, int], keep_grad: bool, with_grad: bool
) -> None:
    ring, window, sinks = 3, settings.get("window", 99), settings.get("sinks", 0)
    for rank in range(ring):
        with as_rank(rank, ring) as config, torch.set_grad_enabled(with_grad):
            cache = KeyCache(config, **settings, keep_grad=keep_grad)
            for chunk, tokens in enumerate(TOKENS):
                key = keys_of(chunk, shard(tokens, ring), rank)
                cache.append(-key, key, chunk=chunk, tokens=tokens)  # an earlier step, which is replaced
                cache.append(key, -key, chunk=chunk, tokens=tokens)
                kept = [n for n in range(chunk + 1) if n < sinks or n > chunk - window]
                expected = torch.cat([keys_of(n, shard(TOKENS[n], ring), rank) for n in kept], 1)
                assert cache.key.equal(expected)
                assert cache.value.equal(-expected)
                assert cache.positions.tolist() == expected[0, :, 0, 0].tolist()
                assert cache.q_lengths == shard(tokens, ring)
                assert cache.kv_lengths == [sum(shard(TOKENS[n], ring)[r] for n in kept) for r in range(ring)]
                everyone = [keys_of(n, shard(TOKENS[n], ring), r)[0, :, 0, 0] for r in range(ring) for n in kept]
                assert cache.all_positions.tolist() == torch.cat(everyone).tolist()


def _filled(chunks: int = 3, **settings: Any) -> KeyCache:
    cache = KeyCache(**settings)
    for chunk in range(chunks):
        cache.append(*torch.randn(2, 2, 5, 3, 4).unbind(), chunk=chunk, tokens=5)
    return cache


@torch.no_grad()
def test_a_window_is_never_allocated_again_and_keys_are_views_of_it() -> None:
    cache = _filled(1, window=3, sinks=1)
    places = {cache.key.data_ptr(), cache.value.data_ptr()}
    for chunk in range(1, 9):
        cache.append(*torch.randn(2, 2, 5, 3, 4).unbind(), chunk=chunk, tokens=5)
        assert {cache.key.data_ptr(), cache.value.data_ptr()} == places
        assert cache.key.untyped_storage().nbytes() == 2 * 4 * 5 * 3 * 4 * 4


@torch.no_grad()
def test_room_doubles_or_has_the_given_capacity() -> None:
    for settings, expected in (({}, 5), ({"capacity": 80}, 1)):
        cache, places = KeyCache(**settings), []
        for chunk in range(16):
            cache.append(*torch.randn(2, 2, 5, 3, 4).unbind(), chunk=chunk, tokens=5)
            places.append(cache.key.untyped_storage().nbytes())
        assert len(set(places)) == expected, "5, 10, 20, 40 and 80 tokens, or 80 at once"


def test_gradients_flow_to_the_current_chunk_and_later_chunks_overwrite_nothing_that_is_saved() -> None:
    old, new, query = (torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cache = KeyCache(window=1, sinks=1)
    cache.append(old, old, chunk=0, tokens=5)
    cache.append(new, new, chunk=1, tokens=5)
    out = context_parallel_attention(query, **cache.attention_kwargs())
    for chunk in (2, 3):
        cache.append(torch.randn_like(old), torch.randn_like(old), chunk=chunk, tokens=5)
    out.sum().backward()
    assert old.grad is None
    assert new.grad is not None
    assert query.grad is not None


@pytest.mark.parametrize("frozen", [True, False])
def test_queries_train_also_where_keys_are_constants(frozen: bool) -> None:
    cache = _filled(2)
    query = torch.randn(2, 5, 3, 4, requires_grad=True)
    keys = torch.randn(2, 2, 5, 3, 4, requires_grad=not frozen)
    cache.append(*keys.unbind(), chunk=2, tokens=5)
    out = context_parallel_attention(query, **cache.attention_kwargs())
    cache.append(*keys.unbind(), chunk=3, tokens=5)
    out.sum().backward()
    assert query.grad is not None


def test_gradients_of_earlier_chunks_are_kept_until_detach() -> None:
    chunks = [torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    cache = KeyCache(keep_grad=True)
    for chunk, x in enumerate(chunks):
        cache.append(x, x, chunk=chunk, tokens=5)
        if chunk == 1:
            cache.detach()
    out = context_parallel_attention(torch.randn_like(chunks[0]), **cache.attention_kwargs())
    out.sum().backward()
    assert [x.grad is None for x in chunks] == [True, True, False, False]
    expected = torch.cat([x.detach() for x in chunks], 1)
    assert cache.key.equal(expected)


def test_a_rollout_in_inference_mode_can_be_trained_on() -> None:
    with torch.inference_mode():
        cache = _filled(3, window=2)
    x = torch.randn(2, 5, 3, 4, requires_grad=True)
    for chunk in (3, 4):
        cache.append(x, x, chunk=chunk, tokens=5)
        context_parallel_attention(x, **cache.attention_kwargs()).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_block_sees_the_keys_of_its_forward_and_stores_nothing(reentrant: bool) -> None:
    def gradient(checkpointed: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        cache, x = _filled(2), torch.randn(2, 5, 3, 4, requires_grad=True)

        def block(x: Tensor) -> Tensor:
            cache.append(x, 2 * x, chunk=2, tokens=5)
            return context_parallel_attention(x, **cache.attention_kwargs())

        out = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
        clean = torch.randn(2, 5, 3, 4)
        with torch.no_grad():
            cache.append(clean, clean, chunk=2, tokens=5)
            cache.append(-clean, clean, chunk=3, tokens=5)
        out.square().sum().backward()
        with torch.no_grad():
            cache.append(clean, clean, chunk=4, tokens=5)
        assert x.grad is not None
        return x.grad, cache.key

    for found, expected in zip(gradient(True), gradient(False), strict=True):
        assert found.equal(expected)


def test_a_recomputed_block_is_refused_if_the_window_has_moved_on() -> None:
    cache, x = _filled(2, window=2), torch.randn(2, 5, 3, 4, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        cache.append(x, x, chunk=2, tokens=5)
        return context_parallel_attention(x, **cache.attention_kwargs())

    out = checkpoint(block, x, use_reentrant=False)
    cache.append(x, x, chunk=3, tokens=5)
    with pytest.raises(ShapeError, match="chunk=2 is recomputed in backward, but this cache has dropped"):
        out.sum().backward()


def test_a_block_that_is_recomputed_after_a_reset_is_refused() -> None:
    cache, x = _filled(2), torch.randn(2, 5, 3, 4, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        cache.append(x, x, chunk=2, tokens=5)
        return context_parallel_attention(x, **cache.attention_kwargs())

    def forward_of_another_sample() -> None:
        cache.reset()
        with torch.no_grad():
            for chunk in range(3):
                cache.append(x, x, chunk=chunk, tokens=5)

    plain = block(x)
    forward_of_another_sample()
    checkpointed = checkpoint(block, x, use_reentrant=False)
    checkpointed.sum().backward()
    plain.sum().backward()  # has its own copies of the keys
    checkpointed = checkpoint(block, x, use_reentrant=False)
    forward_of_another_sample()
    with pytest.raises(ShapeError, match="between the forward of a checkpointed block and its backward"):
        checkpointed.sum().backward()


def test_masks_by_position() -> None:
    def visible(q: Tensor, k: Tensor) -> Tensor:
        return ((q - k).abs() < 9) & (k % 3 != 1)

    for rank in range(3):
        with as_rank(rank, 3) as config:
            cache = KeyCache(config, window=2, sinks=1)
            for chunk, tokens in enumerate(TOKENS):
                key = keys_of(chunk, shard(tokens, 3), rank)
                cache.append(key, key, chunk=chunk, tokens=tokens)
            queries = torch.arange(sum(TOKENS[:-1]), sum(TOKENS))
            expected = visible(queries[:, None], cache.all_positions)
            own = expected[2 * rank : 2 * rank + 2]
            assert cache.query_mask(visible).equal(own[None, None])
            mask = cache.block_mask(visible, block_size=4)
            assert mask.orders[1] is not None
            rows, columns = torch.arange(6)[:, None], mask.orders[1]
            zero = torch.zeros((), dtype=torch.int64)
            assert mask.visible(zero, zero, rows, columns).equal(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk": 4}, "chunk=4 cannot follow the 3 chunks of this cache: append chunk 3, or 2 again, or call reset"),
        ({"chunk": 0}, "chunk=0 cannot follow the 3 chunks"),
        ({"batch": 1}, "differ in batch, heads, head_dim, dtype or device"),
        ({"dtype": torch.bfloat16}, "differ in batch, heads, head_dim, dtype or device"),
        ({"device": "meta"}, "differ in batch, heads, head_dim, dtype or device"),
        ({"tokens": 6}, r"have 5 tokens on rank 0, but the 6 tokens of the chunk are divided as \[6\] over ring=1"),
        ({"tokens": [2, 3]}, r"divided as \[2, 3\] over ring=1 x ulysses=1"),
        ({"value": 4}, "must have one shape"),
    ],
)
def test_what_is_refused_changes_nothing(settings: dict[str, Any], message: str) -> None:
    cache, given = _filled(), {"chunk": 3, "batch": 2, "dtype": torch.float32, "device": "cpu", "tokens": 5, "value": 5}
    before = cache.key.clone()
    given |= settings
    kind = {"dtype": given["dtype"], "device": given["device"]}
    key, value = torch.zeros(given["batch"], 5, 3, 4, **kind), torch.zeros(given["batch"], given["value"], 3, 4, **kind)
    with pytest.raises(ShapeError, match=message):
        cache.append(key, value, chunk=given["chunk"], tokens=given["tokens"])
    assert cache.key.equal(before)
    assert cache.q_lengths == [5]
    cache.reset()
    with pytest.raises(ShapeError, match="this KeyCache is empty"):
        cache.attention_kwargs()
    cache.append(torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2, 4), chunk=0, tokens=3)


@pytest.mark.parametrize(("name", "value"), [("window", 0), ("sinks", -1), ("capacity", 1.5), ("window", True)])
def test_bad_settings(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} must be an int of at least"):
        KeyCache(**{name: value})
