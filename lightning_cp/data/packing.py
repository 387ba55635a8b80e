"""Pack samples of different lengths into one row of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_cp.errors import PlanError, ShapeError
from lightning_cp.plans import REGISTERED, Plan, registered_plan


@dataclass(frozen=True)
class PackedCollate:
    """Concatenate the tokens of samples into one row: a `collate_fn` for DataLoader.

    A sample is a dict. Values with one entry for each token are [tokens of the sample, ...]; the batch has them as
    [1, tokens of all samples, ...]. Other values are collated as DataLoader does it: [samples, ...]. For each modality
    the batch also has

    - `<modality>_documents`: int64 [1, tokens], the number of each token's sample in the row, from 0. A value of a
      whole sample is repeated for its tokens by `batch["time"][batch["image_documents"]]`: [1, tokens].
    - `<modality>_lengths`: int64 [samples], the number of tokens of each sample.

    Args:
        tokens: names of the values with one entry for each token, by modality. All values of a modality have the same
            number of tokens in a sample, at least 1.
        max_tokens: largest number of tokens of a row, over all modalities; None: any. See `PackedBatches`.
        model: transformer of diffusers, or its class, that gets the rows, to check that it can; None: not checked.
    Raises:
        PlanError: a row of the model can hold only one sample, because it has one time, one grid of positions or no
            mask for a row.
        ValueError: `tokens` names no value, or one value in two modalities; or max_tokens is not positive.
    """

    tokens: Mapping[str, Sequence[str]]
    max_tokens: int | None = None
    model: InitVar[Any] = None

    def __post_init__(self, model: Any) -> None:
        names = [name for names in self.tokens.values() for name in names]
        empty = not self.tokens or any(isinstance(x, str) or not x for x in self.tokens.values())
        if empty or len(set(names)) < len(names):
            raise ValueError(
                f"tokens={dict(self.tokens)} must list at least one name for each modality, and each name once, such "
                'as {"image": ["latents", "ids"], "text": ["prompt"]}'
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1, or None")
        if model is not None:
            _check_model(model if isinstance(model, type) else type(model))

    def dims(self, *modalities: str) -> dict[str, int]:
        """Return the dim of tokens of each value in a batch, for `strategy.shard`.

        Args: modalities: those to shard; none: all.
        Raises: ValueError: an unknown modality.
        """
        unknown = [x for x in modalities if x not in self.tokens]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of the modalities {list(self.tokens)}")
        chosen = modalities or tuple(self.tokens)
        return {name: 1 for x in chosen for name in (*self.tokens[x], f"{x}_documents")}

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Build a batch. Raises: ShapeError, ValueError: samples that do not fit `tokens` or each other."""
        self._check_names(samples)
        packed = {name for names in self.tokens.values() for name in names}
        batch: dict[str, Any] = {}
        for modality, names in self.tokens.items():
            lengths = [_length(sample, names, modality, number) for number, sample in enumerate(samples)]
            for name in names:
                batch[name] = _concatenated(name, [sample[name] for sample in samples])[None]
            batch[f"{modality}_lengths"] = torch.tensor(lengths)
            batch[f"{modality}_documents"] = torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths))[None]
        total = sum(batch[f"{modality}_documents"].shape[1] for modality in self.tokens)
        if self.max_tokens is not None and total > self.max_tokens:
            raise ShapeError(
                f"{len(samples)} samples have {total} tokens together, more than max_tokens={self.max_tokens}: use "
                "PackedBatches as the batch_sampler, a smaller batch_size, or a larger max_tokens"
            )
        rest = [name for name in samples[0] if name not in packed]
        return batch | {name: default_collate([sample[name] for sample in samples]) for name in rest}

    def _check_names(self, samples: Sequence[Mapping[str, Any]]) -> None:
        if not samples:
            raise ValueError("a row needs at least one sample, got none")
        first = samples[0].keys()
        added = {f"{modality}_{kind}" for modality in self.tokens for kind in ("documents", "lengths")}
        for number, sample in enumerate(samples):
            absent = [name for names in self.tokens.values() for name in names if name not in sample]
            if absent:
                raise ValueError(f"sample {number} of a row has no {absent[0]!r}, only {sorted(sample)}; see `tokens`")
            if sample.keys() != first:
                raise ValueError(f"samples of a row must have the same names: {sorted(first)} and {sorted(sample)}")
            if added & sample.keys():
                raise ValueError(f"{min(added & sample.keys())!r} in a sample is a name that PackedCollate adds")


@dataclass(frozen=True)
class PackedBatches:
    """Divide an order of samples into rows of at most `max_tokens` tokens: a `batch_sampler` for `PackedCollate`.

    Rows keep the order: a row ends before the first sample that would exceed the limit. The number of rows depends on
    the order, so there is no length.

    Args:
        lengths: number of tokens of each sample of the data set, over all modalities.
        max_tokens: largest number of tokens of a row.
        order: indices of the samples, such as a `RandomSampler`; None: ascending. It is read again in each epoch.
    Raises: ValueError: a sample has no tokens or more than `max_tokens`, or `order` can be read only once.
    """

    lengths: Sequence[int]
    max_tokens: int
    order: Iterable[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.order, Iterator):
            raise ValueError(
                f"order is a {type(self.order).__name__}, which can be read only once: the second epoch would have no "
                "rows. Use a sampler or a list"
            )
        for index, length in enumerate(self.lengths):
            if not 0 < length <= self.max_tokens:
                raise ValueError(
                    f"sample {index} has {length} tokens: it must have 1 to max_tokens={self.max_tokens}. Leave it "
                    "out, or use a larger max_tokens"
                )

    def __iter__(self) -> Iterator[list[int]]:
        row: list[int] = []
        total = 0
        for index in range(len(self.lengths)) if self.order is None else self.order:
            if total + self.lengths[index] > self.max_tokens:
                yield row
                row, total = [], 0
            row.append(index)
            total += self.lengths[index]
        if row:
            yield row


def _check_model(kind: type) -> None:
    plan = registered_plan(kind)
    if plan is None or not plan.packed:
        able = sorted(name for name, x in REGISTERED.items() if isinstance(x, Plan) and x.packed)
        raise PlanError(
            f"model={kind.__name__} cannot get several samples in one row: it has one time, one grid of positions or "
            f"no mask for a row. Models that can are {', '.join(able)}, and your own with a time and ids for each "
            "token (without `model=`). Otherwise batch samples of one size (lightning_cp.data.BucketBatchSampler)"
        )


def _length(sample: Mapping[str, Any], names: Sequence[str], modality: str, number: int) -> int:
    """Return the number of tokens of a modality in a sample. Raises: ShapeError: values differ, or there are none."""
    for name in names:
        value = sample[name]
        if not isinstance(value, Tensor) or not value.ndim:
            kind = "a scalar tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ShapeError(
                f"{name!r} of sample {number} of a row is {kind}: it must be a tensor [tokens, ...], because `tokens` "
                "names it"
            )
    lengths = {name: len(sample[name]) for name in names}
    if len(set(lengths.values())) > 1 or not min(lengths.values()):
        raise ShapeError(
            f"the values of {modality!r} in sample {number} of a row have {lengths} tokens: all must have the same "
            "number in dim 0, at least 1"
        )
    return lengths[names[0]]


def _concatenated(name: str, values: Sequence[Tensor]) -> Tensor:
    """Concatenate along dim 0. Raises: ShapeError: the other dims, or the dtypes, differ."""
    first = values[0]
    for number, value in enumerate(values):
        if value.shape[1:] != first.shape[1:] or value.dtype != first.dtype:
            raise ShapeError(
                f"{name!r} is {list(first.shape)} of {first.dtype} in sample 0 of a row and {list(value.shape)} of "
                f"{value.dtype} in sample {number}: only the number of tokens (dim 0) may differ"
            )
    return torch.cat(list(values))
