"""Divide the samples of a transformer call into several calls, and join their results."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.shards import shard_range
from lightning_cp.errors import ShapeError
from lightning_cp.nest import of_type

_BATCH_DIMS = {"encoder_hidden_states_llama3": 1}  # batch dim of arguments if not 0 (HiDream: dim 0 is the layers)
# Positions of tokens are the same for all samples, and their number may be the batch size. Some models get a batch of
# them, with at least this many dims.
_ROTARY = ("image_rotary_emb", "rope_interpolation_scale", "rotary_embedding", "scale_factor", "video_rotary_emb")
_MIN_DIMS = dict.fromkeys((*_ROTARY, "image_cond_ids", "text_rope_pos", "visual_rope_pos"), 3)
_INDICES = "indices_"  # names of positions of frames: [frames] or [b, frames]
_WHOLE = ("img_ids", "txt_ids")  # models that get a batch of them use the first


def main_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the latents: the first argument of the transformer's forward."""
    if args:
        return args[0]
    return kwargs.get(list(inspect.signature(type(module).forward).parameters)[1])


def select_samples(value: Any, size: int, chosen: slice, *, of_lists: bool, dim: int = 0, min_dims: int = 1) -> Any:
    """Return some of the samples of a transformer's arguments.

    Args:
        value: nest of arguments. Tensors with `size` samples are split; everything else stays whole.
        size: number of samples. chosen: the samples to return.
        of_lists: the latents are a list of tensors, one for each sample.
        dim: batch dim of tensors. min_dims: tensors with fewer dims have no batch dim.
    """
    if isinstance(value, Tensor):
        is_split = value.ndim >= max(dim + 1, min_dims) and value.shape[dim] == size
        return value[(slice(None),) * dim + (chosen,)] if is_split else value
    if isinstance(value, dict):
        return {
            name: x
            if name in _WHOLE
            else select_samples(
                x,
                size,
                chosen,
                of_lists=of_lists,
                dim=_BATCH_DIMS.get(name, 0),
                min_dims=_MIN_DIMS.get(name, 2 if str(name).startswith(_INDICES) else 1),
            )
            for name, x in value.items()
        }
    if isinstance(value, list) and len(value) == size and (of_lists or _describes_samples(value)):
        return value[chosen]
    if isinstance(value, (list, tuple)):
        return type(value)(select_samples(x, size, chosen, of_lists=of_lists, min_dims=min_dims) for x in value)
    return value


def _describes_samples(value: list[Any]) -> bool:
    """Return True if the entries are shapes or texts: these are one per sample. Numbers may be layer indices."""
    return all(isinstance(x, (str, list, tuple)) and not any(True for _ in of_type(Tensor, x)) for x in value)


def micro_batches(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], most: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Divide the samples of a transformer call into at most `most` calls with about equal numbers of samples."""
    main = main_argument(module, args, kwargs)
    is_list = isinstance(main, (list, tuple))
    size = len(main) if is_list or (isinstance(main, Tensor) and main.ndim) else 1
    count = min(size, most)
    if count < 2:
        return [(args, kwargs)]
    shares = [shard_range(size, count, i) for i in range(count)]
    return [select_samples((args, kwargs), size, slice(x.start, x.stop), of_lists=is_list) for x in shares]


def join_samples(results: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the results of calls with `sizes` samples. Raises: ShapeError: a result has another number of samples."""
    first = results[0]
    if isinstance(first, Tensor):
        if any(not x.ndim or len(x) != size for x, size in zip(results, sizes, strict=True)):
            shapes = [tuple(x.shape) for x in results]
            raise ShapeError(f"results of shapes {shapes} must have {list(sizes)} samples in dim 0: use one prompt")
        return torch.cat(list(results))
    if isinstance(first, list) and all(len(x) == size for x, size in zip(results, sizes, strict=True)):
        return [x for result in results for x in result]  # a tensor for each sample
    if isinstance(first, OrderedDict):
        return type(first)(**{name: join_samples([x[name] for x in results], sizes) for name in first})
    if isinstance(first, tuple):
        return tuple(join_samples(entries, sizes) for entries in zip(*results, strict=True))
    return first
