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
from lightning_cp.plans import REGISTERED
from lightning_cp.plans.plan import Batch

# Positions of tokens are the same for all samples, and their number may be the batch size. Some models get a batch of
# them, with at least this many dims.
_ROTARY = ("image_rotary_emb", "rope_interpolation_scale", "rotary_embedding", "scale_factor", "video_rotary_emb")
_MIN_DIMS = dict.fromkeys((*_ROTARY, "image_cond_ids", "text_rope_pos", "visual_rope_pos"), 3)
_INDICES = "indices_"  # names of positions of frames: [frames] or [b, frames]
_FOLDED = "encoder_attention_mask"  # [b, ...], or [b x frames, 1, s], frames innermost
_PLAIN = Batch("")
_BATCHES = {plan.batch.marker: plan.batch for plan in REGISTERED.values() if plan.batch is not None}
# Arguments with one entry per sample, and their number of dims. In one process, other numbers of samples are an error,
# but one text for all samples is not: models add it to each sample.
_TEXTS = {"encoder_hidden_states": 3, "pooled_projections": 2}


def main_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the latents: the first argument of the transformer's forward."""
    if args:
        return args[0]
    return kwargs.get(list(inspect.signature(type(module).forward).parameters)[1])


def select_from_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, chosen: slice, *, of_lists: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a transformer's call for some of its samples; see `select_samples`."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    keys = [*names, *range(len(names), len(args))][: len(args)]
    selected = select_samples({**dict(zip(keys, args, strict=True)), **kwargs}, size, chosen, of_lists=of_lists)
    return tuple(selected.pop(name) for name in keys), selected


def select_samples(value: Any, size: int, chosen: slice, *, of_lists: bool, dim: int = 0, min_dims: int = 1) -> Any:
    """Return some of the samples of a transformer's arguments.

    Args:
        value: nest of arguments. Tensors with `size` samples are split; everything else stays whole.
        size: number of samples. chosen: the samples to return.
        of_lists: the latents are a list of tensors, one for each sample.
        dim: batch dim of tensors. min_dims: tensors with fewer dims have no batch dim.
    Raises: ShapeError: the arguments are of a class without batch dim.
    """
    if isinstance(value, Tensor):
        is_split = value.ndim >= max(dim + 1, min_dims) and value.shape[dim] == size
        return value[(slice(None),) * dim + (chosen,)] if is_split else value
    if isinstance(value, dict):
        return _select_by_name(value, size, chosen, of_lists=of_lists)
    if isinstance(value, list) and len(value) == size and (of_lists or _describes_samples(value)):
        return value[chosen]
    if isinstance(value, (list, tuple)):
        return type(value)(select_samples(x, size, chosen, of_lists=of_lists, min_dims=min_dims) for x in value)
    return value


def _select_by_name(value: dict[str, Any], size: int, chosen: slice, *, of_lists: bool) -> dict[str, Any]:
    batch = next((_BATCHES[name] for name in value if name in _BATCHES), _PLAIN)
    if batch.single:
        raise ShapeError(f"{batch.single}: call the transformer once per branch of guidance")
    selected: dict[str, Any] = {}
    for name, x in value.items():
        is_text = name not in batch.whole and isinstance(x, Tensor) and x.ndim == _TEXTS.get(name)
        if is_text and len(x) not in (1, size):
            raise ShapeError(
                f"{name} has {len(x)} samples and the latents have {size} (branches of guidance count): they must be "
                "equal, because this call's samples are divided"
            )
        per_sample = 1
        if name == _FOLDED and isinstance(x, Tensor) and x.ndim:
            per_sample = max(1, len(x) // size)
        selected[name] = (
            x
            if name in batch.whole
            else select_samples(
                x,
                size * per_sample,
                slice(chosen.start * per_sample, chosen.stop * per_sample),
                of_lists=of_lists,
                dim=batch.dims.get(name, 0),
                min_dims=_MIN_DIMS.get(name, 2 if str(name).startswith(_INDICES) else 1),
            )
        )
    if batch.images is not None and isinstance(value.get(batch.images[0]), dict):
        sizes, latents = value[batch.images[0]], value.get(batch.images[1]) or []
        selected |= zip(batch.images, _images_of(sizes, latents, chosen), strict=True)
    return selected


def _images_of(
    sizes: dict[int, list[Any]], latents: list[Tensor], chosen: slice
) -> tuple[dict[int, list[Any]], list[Tensor]]:
    """Return the input images of some of the samples.

    Args:
        sizes: positions in the text of each image, by index of the sample.
        latents: the images of all samples, in the order of `sizes`.
    """
    kept_sizes, kept, first = {}, [], 0
    for sample, places in sizes.items():
        if chosen.start <= sample < chosen.stop:
            kept_sizes[sample - chosen.start] = places
            kept += latents[first : first + len(places)]
        first += len(places)
    return kept_sizes, kept


def _describes_samples(value: list[Any]) -> bool:
    """Return True if the entries are shapes or texts: these are one per sample. Numbers may be layer indices."""
    return all(isinstance(x, (str, list, tuple)) and not any(True for _ in of_type(Tensor, x)) for x in value)


def divide_samples(
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
    return [select_from_call(module, args, kwargs, size, slice(x.start, x.stop), of_lists=is_list) for x in shares]


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
