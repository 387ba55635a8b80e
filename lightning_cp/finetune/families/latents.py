"""Latents of a sample: a tensor, or a dict of tensors where a model generates several things (a clip and its sound)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Latents = Tensor | dict[str, Tensor]  # the names of a dict and their order are the same for all samples of a family


def by_name(latents: Latents | None) -> dict[str, Tensor]:
    """Return the tensors by name; a tensor that is not in a dict has the name ""; None: an empty dict."""
    return {} if latents is None else {"": latents} if isinstance(latents, Tensor) else latents


def like(latents: Latents, named: Mapping[str, Tensor]) -> Latents:
    """Return tensors of `by_name` as a tensor, or as a dict, as `latents` is."""
    return named[""] if isinstance(latents, Tensor) else dict(named)


def main_latents(latents: Latents) -> Tensor:
    """Return the tensor that decides the number of tokens and the time: the only one, or the first of a dict."""
    return next(iter(by_name(latents).values()))
