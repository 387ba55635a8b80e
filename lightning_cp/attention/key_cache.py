"""Keys and values of the chunks of a sequence that is generated chunk by chunk, sharded over the context group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention.sparse import SparseMask
from lightning_cp.comm.shards import sizes_in
from lightning_cp.comm.transforms import transforms_are_on
from lightning_cp.compat.compiler import uncompiled
from lightning_cp.compat.torch_names import in_backward
from lightning_cp.config import ContextParallelConfig, context_config
from lightning_cp.errors import ShapeError
from lightning_cp.mesh.groups import SINGLE_RANK, groups_for

# (positions of queries, positions of keys) -> True if the query attends to the key. Both are int64 and broadcast.
Visible = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Chunk:
    """A chunk of a sequence.

    Attributes:
        number: index of the chunk, from 0.
        start: position of its first token in the sequence.
        sizes: number of its tokens on each rank, in rank order.
    """

    number: int
    start: int
    sizes: tuple[int, ...]

    def positions(self, rank: int) -> Tensor:
        """Return the positions of a rank's tokens, int64 on the host."""
        first = self.start + sum(self.sizes[:rank])
        return torch.arange(first, first + self.sizes[rank], device="cpu")


@dataclass
class Chunks:
    """The chunks that are kept, in the order of time.

    Attributes:
        window: number of chunks to which a chunk attends, itself included; None: all.
        sinks: number of first chunks to which all chunks attend.
    """

    window: int | None
    sinks: int
    kept: list[Chunk] = field(default_factory=list)

    def start_of(self, number: int) -> int:
        """Return the position at which a chunk starts. Raises: ShapeError: it is neither the latest chunk nor next."""
        latest = self.kept[-1] if self.kept else None
        following = 0 if latest is None else latest.number + 1
        if latest is not None and number == latest.number:
            return latest.start
        if number != following:
            again = f", or {following - 1} again," if following else ""
            raise ShapeError(
                f"chunk={number} cannot follow the {following} chunks of this cache: append chunk {following}{again} "
                "or call reset() for another sample"
            )
        return 0 if latest is None else latest.start + sum(latest.sizes)

    def left_by(self, number: int) -> list[Chunk]:
        """Return the kept chunks to which a chunk does not attend, and the chunk itself."""
        return [chunk for chunk in self.kept if chunk.number not in self._attended_by(number)]

    def before(self, number: int) -> list[Chunk]:
        """Return the kept chunks before a chunk."""
        return [chunk for chunk in self.kept if chunk.number < number]

    def again(self, number: int) -> Chunk:
        """Return a chunk that is computed again. Raises: ShapeError: a chunk to which it attends was dropped."""
        found = [chunk for chunk in self.kept if chunk.number == number]
        if not found or [chunk.number for chunk in self.before(number)] != self._attended_by(number):
            raise ShapeError(
                f"chunk={number} is recomputed in backward, but this cache has dropped chunks to which it attends: "
                "call backward before later chunks are appended, or do not checkpoint this block"
            )
        return found[0]

    def _attended_by(self, number: int) -> list[int]:
        """Return the numbers of the earlier chunks to which a chunk attends."""
        first = 0 if self.window is None else max(number - self.window + 1, 0)
        return [n for n in range(number) if n < self.sinks or n >= first]


class KeyCache:
    """Keys and values of one attention layer for the chunks of a sequence: each rank keeps its shard of every chunk.

    `append` adds the keys of a chunk. The attributes below then describe the keys to which this chunk attends, its own
    included, and `attention_kwargs()` passes them to `context_parallel_attention`. Nothing is gathered or exchanged.

    Args:
        parallel_config: `ContextParallelConfig` or `ParallelConfig`, lightning_cp's or diffusers'; None: one rank.
        window: number of chunks to which a chunk attends, itself included; None: all. Older keys are dropped.
        sinks: number of first chunks that are never dropped.
        capacity: number of tokens, of all ranks together, for which room is made at the first chunk; 0: for the
            window if there is one; otherwise room grows by doubling.
        keep_grad: False: gradients flow to the keys of the current chunk only. True: also to those of all chunks since
            `detach`, which are then concatenated in each call, in place of views of the room.
        shares: weight of each rank of the context group, by which chunks are divided; None: equal.

    Attributes:
        key, value: [batch, keys_local, heads, head_dim]; without gradients a view of the room, valid until the next
            `append`.
        q_lengths, kv_lengths: number of tokens of the chunk, and of keys, on each rank, in rank order.
    Raises: ValueError, TypeError: bad settings.
    """

    def __init__(
        self,
        parallel_config: object = None,
        *,
        window: int | None = None,
        sinks: int = 0,
        capacity: int = 0,
        keep_grad: bool = False,
        shares: Sequence[float] | None = None,
    ) -> None:
        for name, value, least in (("window", window, 1), ("sinks", sinks, 0), ("capacity", capacity, 0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name}={value!r} must be an int of at least {least}")
        self._config = ContextParallelConfig() if parallel_config is None else context_config(parallel_config)
        self._groups = SINGLE_RANK if self._config.mesh_shape == (1, 1) else groups_for(self._config, shares)
        self._shares, self._sample = shares, 0
        self._recomputed = 0  # sample whose keys the last recomputation took
        self._window, self._sinks, self._capacity, self._keep_grad = window, sinks, capacity, keep_grad
        self.reset()

    def reset(self) -> None:
        """Drop all chunks and their room, for another sample.

        With activation checkpointing, call backward before: a block that is recomputed later would take the keys of the
        new sample, and raises ShapeError if its keys or values have gradients. For samples with one backward, use a
        cache for each.
        """
        self._sample += 1
        self._chunks = Chunks(self._window, self._sinks)
        self._with_grad: list[tuple[Tensor, Tensor]] = []  # of the last chunks, with `keep_grad`; the room has the rest
        self._room: KeyRoom | None = None
        self._kind: tuple[Any, ...] = ()
        self._attended: list[Chunk] = []
        self._tensors: tuple[Tensor, Tensor] | None = None
        self._lengths: tuple[list[int], list[int]] = [], []

    def append(self, key: Tensor, value: Tensor, *, chunk: int, tokens: int | Sequence[int]) -> None:
        """Add this rank's keys and values of a chunk, and drop the chunks that have left the window.

        A second call for the latest chunk replaces its keys, so that each denoising step may append them. In backward
        (the recomputation of a checkpointed block) nothing is stored, and the attributes are those of the forward.

        Args:
            key, value: [batch, seq_local, heads, head_dim].
            chunk: number of the chunk, from 0: the latest one or the next.
            tokens: number of tokens of the chunk on all ranks together, which divide it as `strategy.shard` does; or a
                list with the number of each rank.
        Ranks: all of the context group append the same chunks. No communication.
        Raises: ShapeError: another order of chunks, or other shapes, dtypes or devices than before.
        """
        uncompiled(self._append)(key, value, chunk, tokens)

    def _append(self, key: Tensor, value: Tensor, chunk: int, tokens: int | Sequence[int]) -> None:
        sizes = sizes_in(self._groups, tokens) if isinstance(tokens, int) else tuple(tokens)
        self._check(key, value, sizes)
        if in_backward():
            self._recomputed = self._sample
            current = self._chunks.again(chunk)
            before = self._chunks.before(chunk)
            self._show([*before, current], *self._joined(before, key, value))
            return
        current = Chunk(chunk, self._chunks.start_of(chunk), sizes)
        for left in self._chunks.left_by(chunk):
            self._drop(left)
        before = [*self._chunks.kept]
        if torch.is_grad_enabled() and not transforms_are_on():
            key, value = (_of_sample(x, self, self._sample) for x in (key, value))
        if not self._keep_grad:
            self._write(before, key, value)
        if self._keep_grad or torch.is_grad_enabled():
            self._show([*before, current], *self._joined(before, key, value))
        else:
            self._show([*before, current], *self._kept(key).read(self._local([*before, current])))
        if self._keep_grad:
            self._with_grad.append((key, value))
        self._chunks.kept.append(current)

    def detach(self) -> None:
        """Stop gradients here: later chunks take the keys so far as constants. (Only needed with `keep_grad`.)"""
        held, self._with_grad = self._with_grad, []
        for i, (key, value) in enumerate(held, len(self._chunks.kept) - len(held)):
            self._write(self._chunks.kept[:i], key, value)

    @property
    def key(self) -> Tensor:
        return self._now()[0]

    @property
    def value(self) -> Tensor:
        return self._now()[1]

    @property
    def q_lengths(self) -> list[int]:
        self._now()
        return self._lengths[0]

    @property
    def kv_lengths(self) -> list[int]:
        self._now()
        return self._lengths[1]

    @property
    def positions(self) -> Tensor:
        """Position in the sequence of each key of this rank, int64 [keys_local], on the device of the keys."""
        device = self.key.device
        return torch.cat([x.positions(self._groups.context_rank) for x in self._attended]).to(device)

    @property
    def all_positions(self) -> Tensor:
        """Position of each key of all ranks, int64 [keys of all ranks], in rank order, on the host.

        Each rank holds its shards of all chunks, so this is not the order of time.
        """
        self._now()
        return torch.cat([x.positions(rank) for rank in range(self._groups.context_size) for x in self._attended])

    @property
    def places(self) -> list[int]:
        """Places of the keys in the order of time, in rank order: ranges, each as its first place and its length."""
        chunks, ranks = self._attended, range(self._groups.context_size)
        starts = [0, *accumulate(sum(chunk.sizes) for chunk in chunks)]
        pairs = [(start + sum(x.sizes[:rank]), x.sizes[rank]) for rank in ranks for start, x in zip(starts, chunks)]
        return [number for pair in pairs for number in pair]

    def attention_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `context_parallel_attention` other than the query, which holds the chunk's tokens."""
        shares = {} if self._shares is None else {"shares": self._shares}
        return {
            "key": self.key,
            "value": self.value,
            "q_lengths": self.q_lengths,
            "kv_lengths": self.kv_lengths,
            "parallel_config": self._config,
            **shares,
        }

    def query_mask(self, visible: Visible) -> Tensor:
        """Return the mask of this rank's queries over the keys of all ranks, for `attn_mask`.

        Args: visible: function of the positions of queries and keys in the sequence, with tensors that broadcast.
        Returns: bool [1, 1, seq_local, keys of all ranks], with keys in rank order.
        """
        device = self.key.device
        queries = self._attended[-1].positions(self._groups.context_rank)
        return visible(queries[:, None].to(device), self.all_positions.to(device))[None, None]

    def block_mask(self, visible: Visible, block_size: int = 128) -> SparseMask:
        """Return the same mask for all queries of the chunk, for `block_mask`. Make it once for all layers and steps.

        Args: visible: see `query_mask`. block_size: number of queries, and of keys in the order of time, in a block.
        Returns: a mask with keys in rank order, the same on all ranks.
        """
        device, chunk = self.key.device, self._attended[-1]
        in_time, order = self.all_positions.sort()
        positions = in_time.to(device)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return visible(chunk.start + q, positions[k])

        lengths = sum(chunk.sizes), len(in_time)
        mask = SparseMask.from_mask_mod(mask_mod, *lengths, block_size=block_size, device=device)
        return mask.in_order(None, order.argsort())

    def _now(self) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            raise ShapeError("this KeyCache is empty: append the keys of a chunk first")
        return self._tensors

    def _show(self, chunks: list[Chunk], key: Tensor, value: Tensor) -> None:
        """Set what the attributes describe: the chunks to which the last of them attends, and their keys and values."""
        self._attended, self._tensors = chunks, (key, value)
        lengths = [sum(sizes) for sizes in zip(*(chunk.sizes for chunk in chunks), strict=True)]
        self._lengths = list(chunks[-1].sizes), lengths

    def check_recomputed(self, sample: int) -> None:
        """Check that the last recomputation took keys of this sample. Raises: ShapeError: of a later one."""
        recomputed, self._recomputed = self._recomputed, 0
        if recomputed > sample:
            raise ShapeError(
                "reset() of a KeyCache was called between the forward of a checkpointed block and its backward, so the "
                "block was recomputed with the keys of another sample: call backward before reset(), or use one cache "
                "for each sample"
            )

    def _check(self, key: Tensor, value: Tensor, sizes: tuple[int, ...]) -> None:
        groups, shapes = self._groups, f"key {tuple(key.shape)} and value {tuple(value.shape)}"
        if key.ndim != 4 or key.shape != value.shape or key.dtype != value.dtype:
            raise ShapeError(f"{shapes} must have one shape [batch, seq_local, heads, head_dim] and one dtype")
        if len(sizes) != groups.context_size or key.shape[1] != sizes[groups.context_rank]:
            raise ShapeError(
                f"{shapes} have {key.shape[1]} tokens on rank {groups.context_rank}, but the {sum(sizes)} tokens of "
                f"the chunk are divided as {list(sizes)} over ring={groups.context_shape[0]} x "
                f"ulysses={groups.context_shape[1]}: pass the number of tokens of all ranks, and make the cache with "
                "the parallel_config (and shares) of the model"
            )
        kind = key.shape[0], *key.shape[2:], key.dtype, key.device
        if self._kind not in ((), kind):
            raise ShapeError(
                f"{shapes} on {key.device} in {key.dtype} differ in batch, heads, head_dim, dtype or device from the "
                f"keys of this cache, {self._kind}: use another cache, or call reset() for another sample"
            )
        self._kind = kind

    def _local(self, chunks: Sequence[Chunk]) -> int:
        return sum(chunk.sizes[self._groups.context_rank] for chunk in chunks)

    def _drop(self, chunk: Chunk) -> None:
        kept, stored = self._chunks.kept, len(self._chunks.kept) - len(self._with_grad)
        index = kept.index(chunk)
        if index >= stored:
            del self._with_grad[index - stored]
        elif self._room is not None:
            self._room.drop(self._local(kept[:index]), self._local([chunk]), self._local(kept[:stored]))
        del kept[index]

    def _kept(self, like: Tensor) -> KeyRoom:
        if self._room is None:
            given = sizes_in(self._groups, self._capacity)[self._groups.context_rank]
            self._room = KeyRoom(like, given or like.shape[1] * (self._sinks + (self._window or 1)))
        return self._room

    def _write(self, before: Sequence[Chunk], key: Tensor, value: Tensor) -> None:
        self._kept(key).write(self._local(before), key, value)

    def _joined(self, before: Sequence[Chunk], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Concatenate the keys and values of earlier chunks and these: copies that autograd may save."""
        if not before:
            return key, value
        stored = len(self._chunks.kept) - len(self._with_grad)
        pairs = [self._kept(key).read(self._local(before[:stored])), *self._with_grad[: max(len(before) - stored, 0)]]
        keys, values = zip(*pairs, (key, value), strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)


class _OfSample(torch.autograd.Function):
    """Return keys or values unchanged. Backward: check that a recomputed block had keys of the same sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cache: KeyCache, sample: int) -> Tensor:
        ctx.cache, ctx.sample = cache, sample
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.cache.check_recomputed(ctx.sample)
        return grads[0], None, None


def _of_sample(x: Tensor, cache: KeyCache, sample: int) -> Tensor:
    result: Tensor = _OfSample.apply(x, cache, sample) if x.requires_grad else x  # type: ignore[no-untyped-call]
    return result


class KeyRoom:
    """Two tensors [batch, room, heads, head_dim] for keys and values; the first tokens are in use.

    Autograd never saves them: with gradients, `KeyCache` concatenates what it reads.

    Args: like: a key [batch, tokens, heads, head_dim]. capacity: number of tokens for which room is made.
    """

    def __init__(self, like: Tensor, capacity: int) -> None:
        self._tensors = [_room_like(like, capacity) for _ in range(2)]

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return sum(x.nbytes for x in self._tensors)

    @torch.no_grad()
    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """Write tokens at `start`. If they do not fit, twice the room is allocated."""
        end = start + key.shape[1]
        for i, (kept, x) in enumerate(zip(self._tensors, (key, value), strict=True)):
            if end > kept.shape[1]:
                self._tensors[i] = _room_like(kept, max(2 * kept.shape[1], end))
                self._tensors[i][:, :start] = kept[:, :start]
            self._tensors[i][:, start:end] = x

    def read(self, length: int) -> tuple[Tensor, Tensor]:
        """Return views of the first `length` keys and values."""
        key, value = (x[:, :length] for x in self._tensors)
        return key, value

    @torch.no_grad()
    def drop(self, start: int, length: int, used: int) -> None:
        """Drop `length` tokens at `start`: move those after them, up to `used`, without other memory."""
        for x in self._tensors:
            for at in range(start, used - length, max(length, 1)) if length else ():
                end = min(at + length, used - length)
                x[:, at:end] = x[:, at + length : end + length]


def _room_like(x: Tensor, tokens: int) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode
        return torch.empty(x.shape[0], tokens, *x.shape[2:], dtype=x.dtype, device=x.device)
