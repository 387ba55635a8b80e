"""Compute the mean error of each sample on this rank's tokens of an output that is not gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.shards import gather_shards
from lightning_cp.compat.torch_names import without_dispatch_modes
from lightning_cp.engine.sharding.late_gather import LateGather, note_gather, tokens_of, whole
from lightning_cp.mesh.groups import groups_by_name

# Returns the error of each element, from an output and a target of equal shapes.
Error = Callable[[Tensor, Tensor], Tensor]


def sample_means(error: Error, output: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the weighted mean of the errors of each sample, [b]. An output that is not gathered stays so.

    Target and weights are moved back to the order of the output's tokens, and cut as the tokens are cut.

    Args:
        error: returns the error of each element, from tensors like `output` and `target`, of any equal shapes. If it
            returns another shape, such as a norm over channels, the output is gathered.
        output: [b, ...].
        target: like `output`. If it or the weight requires grad, or the shapes differ, the output is gathered.
        weight: weight of each element, broadcastable to `target`; None: 1. A sample with weight 0 everywhere has 0.
    Raises: ValueError: a weight, and errors of another shape.
    Ranks: all of the context group, each with the whole target; each returns the whole mean. Gradient: of the whole
        mean, to be averaged over the ranks.
    """
    wide = torch.promote_types(target.dtype, torch.float32)  # sums of half precision overflow, and round
    weights = None if weight is None else weight.to(wide).expand_as(target)
    if not isinstance(output, LateGather):
        return _of_whole(error, output, target, weights)
    needs_grad = target.requires_grad or (weight is not None and weight.requires_grad)
    if needs_grad or target.shape != output.shape:
        return _of_gathered("the gradient or the shape of the target", error, output, target, weights)
    if not _is_by_sample(output):
        return _of_gathered("the order of its samples", error, output, target, weights)
    tokens, own = output.tokens, tokens_of(output)
    errors = error(own, _cut(output, target))
    if errors.shape != own.shape:
        return _of_gathered("errors of another shape", error, output, target, weights)
    if weights is None and output.numel() != torch.Size(tokens.shape).numel():  # the model drops some tokens
        weights = torch.ones((), dtype=wide, device=target.device).expand_as(target)
    if weights is not None:
        errors = errors * _cut(output, weights)
    sums = errors.flatten(1).sum(dim=1, dtype=torch.promote_types(errors.dtype, wide))
    ranks = groups_by_name(tokens.groups).context_size
    sums = gather_shards(sums.unsqueeze(0), 0, [1] * ranks, tokens.groups).sum(dim=0)
    if weights is None:
        return (sums / (target.numel() // len(target))).to(errors.dtype)
    return _divided(sums, weights)


def _of_gathered(reason: str, error: Error, output: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
    note_gather(reason)
    return _of_whole(error, whole(output), target, weights)


def _of_whole(error: Error, output: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
    errors = error(output, target)
    if weights is None:
        return errors.flatten(1).mean(dim=1)
    if errors.shape != weights.shape:
        raise ValueError(
            f"the errors {tuple(errors.shape)} have another shape than the target {tuple(target.shape)}, so the weight "
            "cannot be applied: return an error for each element, or multiply by the weights in `error`"
        )
    return _divided((errors * weights).flatten(1).sum(dim=1), weights)


def _divided(sums: Tensor, weights: Tensor) -> Tensor:
    """Divide the sum of each sample by the sum of its weights; 0 if all are 0."""
    total = weights.sum(dim=tuple(range(1, weights.ndim)))
    return sums / torch.where(total > 0, total, 1.0)


def _cut(output: LateGather, x: Tensor) -> Tensor:
    """Return the elements of `x` at the places of this rank's tokens. Args: x: like `output`.

    Tokens that the model drops have no place in `x`: 0 for them.
    """
    with torch.inference_mode(False), torch.enable_grad():  # moving values is linear, and its adjoint moves them back
        start = torch.zeros((), dtype=x.dtype, device=x.device).expand(output.tokens.shape).requires_grad_()
        (moved,) = torch.autograd.grad(output.moved(start), start, x.detach())
    return output.tokens.cut(moved)


_BY_SAMPLE: dict[tuple[Any, ...], bool] = {}


def _is_by_sample(output: LateGather) -> bool:
    """Return True if sample i of the tokens is sample i of the output, and no token is in the output twice.

    Each form is tried once, on tensors that have the number of their sample as values.
    """
    shape = output.tokens.shape
    key = (shape, tuple(output.shape), output.history)
    if key not in _BY_SAMPLE:
        if len(_BY_SAMPLE) >= 256:
            _BY_SAMPLE.clear()
        with without_dispatch_modes(), torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
            start = torch.zeros(()).expand(shape).requires_grad_()
            moved = output.moved(start)
            samples = torch.arange(1.0, len(moved) + 1).view(-1, *[1] * (moved.ndim - 1)).expand_as(moved)
            (count,) = torch.autograd.grad(moved, start, torch.ones(()).expand_as(moved), retain_graph=True)
            (sample,) = torch.autograd.grad(moved, start, samples)
            rows = torch.arange(1.0, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))
            fits = shape[0] == len(moved) and output.tokens.dim > 0
            _BY_SAMPLE[key] = fits and bool((count <= 1).all()) and bool((sample == count * rows).all())
    return _BY_SAMPLE[key]
