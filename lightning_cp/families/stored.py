"""Join stored samples to a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.errors import FamilyError
from lightning_cp.families.family import Sample, TextStorage


class StoredBatch:
    """Tensors of a batch by name, and the text of the empty caption in the same form.

    It is no dict on purpose: Lightning's precision plugins cast floating-point tensors inside of dicts, lists and
    dataclasses. Latents and times would be rounded to bfloat16 before the loss is computed. Lightning moves it to the
    device all the same, because it has `to`.

    Args:
        tensors: [b, ...] by name.
        empty: the text tensors of the empty caption, [1, ...]; needed to drop captions.
    """

    def __init__(self, tensors: dict[str, Tensor], empty: dict[str, Tensor] | None = None) -> None:
        self.tensors, self.empty = tensors, empty

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise FamilyError(f"the stored batch has no {name!r}, only {', '.join(sorted(self.tensors))}")
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(next(iter(self.tensors.values())))

    def get(self, name: str) -> Tensor | None:
        """Return a tensor; None if the batch has none of this name."""
        return self.tensors.get(name)

    def to(self, device: torch.device | str, **kwargs: Any) -> StoredBatch:
        """Return a copy on a device; dtypes do not change."""
        non_blocking = bool(kwargs.get("non_blocking"))
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> StoredBatch:
        """Return a copy in pinned memory. PyTorch's DataLoader calls it."""
        return self._map(Tensor.pin_memory)

    def without_text(self, dropped: Tensor, text: TextStorage) -> StoredBatch:
        """Return the batch with the empty caption in place of some samples' text.

        Args: dropped: bool [b].
        """
        if self.empty is None:
            raise FamilyError("captions can only be dropped from a batch that holds the text of the empty caption")
        names = [*text.names, *([text.mask] if text.form == "masked" else [])]
        chosen = {
            name: torch.where(_like(dropped, self[name]), self.empty[name].to(self[name].dtype), self[name])
            for name in names
        }
        return StoredBatch({**self.tensors, **chosen}, self.empty)

    def _map(self, function: Any) -> StoredBatch:
        empty = None if self.empty is None else {name: function(x) for name, x in self.empty.items()}
        return StoredBatch({name: function(x) for name, x in self.tensors.items()}, empty)


def collate(samples: Sequence[Sample], text: TextStorage, empty: Sample | None = None) -> StoredBatch:
    """Join stored samples to a batch; text is padded as `text` says.

    Args:
        samples: with equal names, and with equal shapes except for the number of text positions.
        empty: stored text of the empty caption.
    Raises: FamilyError: names or shapes differ.
    """
    every = [*samples, *([] if empty is None else [empty])]
    longest = max((len(sample[name]) for sample in every for name in text.sequences), default=0)
    padded = [_padded(sample, text, longest) for sample in every]
    names = padded[0].keys()
    tensors = {}
    for name in names:
        values = [sample.get(name) for sample in padded[: len(samples)]]
        shapes = {None if x is None else tuple(x.shape) for x in values}
        if len(shapes) != 1 or None in shapes:
            raise FamilyError(f"{name}: samples of a batch must have equal shapes, got {sorted(map(str, shapes))}")
        tensors[name] = torch.stack([x for x in values if x is not None])
    if empty is None:
        return StoredBatch(tensors)
    return StoredBatch(tensors, {name: x[None] for name, x in padded[-1].items()})


def _padded(sample: Sample, text: TextStorage, longest: int) -> Sample:
    if text.form == "padded":
        return sample
    length = text.length if text.form == "zeros" else longest
    padded, true = dict(sample), len(sample[text.sequences[0]])
    for name in text.sequences:
        padded[name] = F.pad(sample[name], (0, 0, 0, length - true))
    if text.form == "masked":
        padded[text.mask] = torch.arange(length, device=sample[text.sequences[0]].device) < true
    return padded


def _like(dropped: Tensor, x: Tensor) -> Tensor:
    return dropped.to(x.device).view(-1, *[1] * (x.dim() - 1))
