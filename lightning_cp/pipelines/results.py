"""Samples in the result of a pipeline call: one entry per prompt."""

from __future__ import annotations

from typing import Any, NamedTuple


class ClipWithSound(NamedTuple):
    """A clip with its sound.

    Attributes:
        frames: the clip, in the form of the pipeline's `output_type`.
        sound: [channels, n] in [-1, 1].
        rate_hz: sampling rate of the sound.
    """

    frames: Any
    sound: Any
    rate_hz: int


def samples_of(pipe: Any, result: Any, count: int, *, sound: bool = False) -> list[Any]:
    """Return the entries of the result's first field.

    Args: sound: return `ClipWithSound`s, if the pipeline makes clips with a sound.
    Raises: ValueError: their number is not `count`.
    """
    name, values = ("entries", result[0]) if isinstance(result, tuple) else next(iter(result.items()))
    samples = list(values)
    if len(samples) != count:
        raise ValueError(
            f"{type(pipe).__name__} returned {len(samples)} {name} for {count} prompts, not one per prompt: use "
            f"{'per_call=1' if count > 1 else 'another output_type'}, or call the pipeline directly"
        )
    vocoder = getattr(pipe, "vocoder", None)
    sounds = getattr(result, "audio", None)
    rate_hz = getattr(result, "sampling_rate", None) if vocoder is None else vocoder.config.output_sampling_rate
    if not sound or rate_hz is None or sounds is None:
        return samples
    rate_hz = int(rate_hz)
    return [ClipWithSound(clip, one, rate_hz) for clip, one in zip(samples, sounds, strict=True)]
