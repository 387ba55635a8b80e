"""Join stored samples to a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.comm.background import to_device
from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families.family import Sample, TextStorage


class StoredBatch:
    """Tensors of a batch by name, and the text of the empty caption in the same form.

    It is not a dict, because Lightning's precision plugins cast floating-point tensors in dicts, lists and dataclasses:
    latents and times would be rounded to bfloat16 before the loss is computed. Lightning still moves it to the device,
    because it has a method `to`.

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
        """Return a copy on a device; dtypes do not change. The host does not wait for a copy to a GPU."""
        return self._map(lambda x: to_device(x, device))

    def pin_memory(self) -> StoredBatch:
        """Return a copy in pinned memory. PyTorch's DataLoader calls it."""
        return self._map(Tensor.pin_memory)

    def samples(self, start: int, stop: int) -> StoredBatch:
        """Return the batch of samples `start` to `stop - 1`."""
        return StoredBatch({name: x[start:stop] for name, x in self.tensors.items()}, self.empty)

    def without_text(self, dropped: Tensor, text: TextStorage) -> StoredBatch:
        """Return the batch with the empty caption in place of some samples' text.

        Args: dropped: bool [b].
        """
        if self.empty is None:
            raise FamilyError("captions can only be dropped from a batch that holds the text of the empty caption")
        names = [*text.names, *(part.mask for part in text.parts if part.mask in self)]
        chosen = {
            name: torch.where(_like(dropped, self[name]), self.empty[name].to(self[name].dtype), self[name])
            for name in names
        }
        return StoredBatch({**self.tensors, **chosen}, self.empty)

    def _map(self, function: Any) -> StoredBatch:
        empty = None if self.empty is None else {name: function(x) for name, x in self.empty.items()}
        return StoredBatch({name: function(x) for name, x in self.tensors.items()}, empty)


def collate(
    samples: Sequence[Sample], text: TextStorage, empty: Sample | None = None, *, lengths: Sequence[int] = ()
) -> StoredBatch:
    """Join stored samples to a batch; text is padded as `text` says.

    Args:
        samples: with equal names, and with equal shapes except for the number of text positions.
        empty: stored text of the empty caption.
        lengths: numbers of positions to pad `masked` text to: the smallest one that fits is used, so that compiled
            blocks get few different lengths. If the longest text of the batch is longer than all of them, or if
            `lengths` is empty, text is padded to the longest of the batch.
    Raises: FamilyError: names or shapes differ, or a text does not fit.
    """
    _check_names(samples, text, empty)
    padded = [*samples, *([] if empty is None else [empty])]
    for part in text.parts:
        padded = _padded_equally(padded, part, lengths)
    tensors = {}
    for name in padded[0]:
        values = [sample[name] for sample in padded[: len(samples)]]
        shapes = {tuple(x.shape) for x in values}
        if len(shapes) != 1:
            raise FamilyError(f"{name}: samples of a batch must have equal shapes, got {sorted(map(str, shapes))}")
        tensors[name] = torch.stack(values)
    if empty is None:
        return StoredBatch(tensors)
    return StoredBatch(tensors, {name: x[None] for name, x in padded[-1].items()})


def _check_names(samples: Sequence[Sample], text: TextStorage, empty: Sample | None) -> None:
    if not samples:
        raise FamilyError("a batch must have at least one sample")
    first = samples[0].keys()
    for i, sample in enumerate(samples):
        if sample.keys() != first:
            differing = ", ".join(sorted(sample.keys() ^ first))
            raise FamilyError(f"samples of a batch must hold the same tensors: samples 0 and {i} differ in {differing}")
    stored = {"sample": first} if empty is None else {"sample": first, "empty caption": empty.keys()}
    for kind, names in stored.items():
        missing = [name for name in text.names if name not in names]
        if missing:
            raise FamilyError(f"the stored {kind} has no {', '.join(missing)}")


def _padded_equally(samples: Sequence[Sample], text: TextStorage, lengths: Sequence[int]) -> list[Sample]:
    """Pad one encoder's text of all samples to one length; see `collate`."""
    longest = max((len(sample[name]) for sample in samples for name in text.sequences), default=0)
    length = min((n for n in lengths if n >= longest), default=longest)
    padded = [_padded(sample, text, length) for sample in samples]
    if not lengths and all(sample[text.mask].all() for sample in padded if text.mask in sample):
        padded = [{name: x for name, x in sample.items() if name != text.mask} for sample in padded]
    return padded


def _padded(sample: Sample, text: TextStorage, length: int) -> Sample:
    """Pad a sample's text. Args: length: number of positions of `masked` text."""
    if text.form == "padded" or not text.sequences:
        return sample
    positions = {name: len(sample[name]) for name in text.sequences}
    padded, length = dict(sample), text.length if text.form == "zeros" else length
    for name, number in positions.items():
        if number > length:
            raise FamilyError(f"{name} has {number} positions, more than the {length} of this family")
        padded[name] = F.pad(sample[name], (*[0] * (2 * sample[name].dim() - 1), length - number))
    if text.form == "masked":
        if len(set(positions.values())) > 1:
            raise FamilyError(f"sequences with one mask must have equal lengths, got {positions}")
        first = sample[text.sequences[0]]
        padded[text.mask] = torch.arange(length, device=first.device) < len(first)
    return padded


def _like(dropped: Tensor, x: Tensor) -> Tensor:
    return to_device(dropped, x.device).view(-1, *[1] * (x.dim() - 1))
