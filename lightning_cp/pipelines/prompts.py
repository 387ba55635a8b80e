"""Sample many prompts over data groups: one group samples each prompt, and samples are returned in order."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from PIL import Image

from lightning_cp.comm.agree import gather_objects, raise_on_all
from lightning_cp.comm.shards import shard_range
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.pipelines.state import ParallelPipeline, parallel_state

# Words in argument names that mark images, videos and audio, and words that mark a text mask instead.
_MEDIA = {"image", "images", "video", "videos", "frames", "mask", "masks", "conditions", "audio", "waveforms"}
_TEXT = {"prompt", "attention"}
_LYRICS = "lyrics"


def sample_prompts(
    pipe: Any,
    prompts: Sequence[Any] | Path,
    *,
    seed: int = 0,
    per_call: int = 1,
    write: Callable[[int, Any], None] | None = None,
    collect: bool = True,
    sound: bool = False,
    **inputs: Any,
) -> list[Any]:
    """Call a parallel pipeline with every prompt; each data group samples its share (shares may be uneven).

    Sample i has a separate generator, seeded with `seed + i`. With per_call=1 it depends neither on the number of
    groups nor on the other prompts. With per_call > 1 the pipeline pads texts of unequal length together, which changes
    the numbers of some pipelines.

    Args:
        pipe: pipeline made parallel by `parallelize_pipeline`.
        prompts: list of texts, or a file with one prompt per line; the same on every rank.
        seed: seed of the first sample.
        per_call: prompts per call of the pipeline; must be 1 with images, videos, masks or audio.
        write: called with (prompt index, sample) once per prompt, on one rank, as soon as the sample is ready.
        collect: True: every rank returns all samples. False: each rank returns the samples of its data group.
        sound: return clips of pipelines that also make a sound as `ClipWithSound`.
        inputs: all other arguments of the pipeline, the same for every prompt; `lyrics` may be a list with one text per
            prompt.
    Returns: samples in prompt order: entries of the first field of the pipeline's result.
    Ranks: the whole world.
    Raises: CallFailedError: another rank has failed; its data group stops, the others finish their prompts first.
        ValueError: no prompts; an argument that the pipeline does not take, or not with per_call > 1; a pipeline
        that is not parallel; a result without one entry per prompt. TypeError: the seed is no integer.
    """
    installed = parallel_state(pipe)
    collected: list[Any] = []
    error: Exception | None = None
    try:
        for samples in _sampled(
            pipe, installed, prompts, inputs, seed=seed, per_call=per_call, write=write, sound=sound
        ):
            collected += samples
    except Exception as raised:
        if installed.votes.broken is not None:
            raise
        error = raised
    # one data group: its votes have raised the error on all its ranks
    raise_on_all(error, "failed in sample_prompts", dist.group.WORLD if installed.ranks.data_size > 1 else None)
    return _gather_samples(collected, installed.ranks) if collect else collected


def _sampled(
    pipe: Any,
    installed: ParallelPipeline,
    prompts: Sequence[Any] | Path,
    inputs: Mapping[str, Any],
    *,
    seed: int,
    per_call: int,
    write: Callable[[int, Any], None] | None,
    sound: bool,
) -> Iterator[list[Any]]:
    """Sample the share of this rank's data group; yield the samples of each call.

    An error on one rank of the group ends this on all of them: they vote after each call of the pipeline.
    """
    ranks = installed.ranks
    with installed.votes.call():
        if not isinstance(seed, int):
            raise TypeError(f"seed={seed!r} must be an integer")
        prompt_argument = _check_inputs(pipe, inputs)
        texts = read_prompts(prompts)
        inputs = {**inputs, **_lyrics(pipe, inputs, len(texts))}
        _check_calls(installed, len(texts), per_call, inputs)
    share = shard_range(len(texts), ranks.data_size, ranks.data_rank)
    for first, batch in _batches(texts, share, per_call):
        with installed.votes.call():
            generators = [torch.Generator().manual_seed(seed + first + i) for i in range(len(batch))]
            call_inputs = _for_each(inputs, range(first, first + len(batch)))
            result = pipe(**{prompt_argument: batch}, generator=generators, **call_inputs)
            samples = samples_of(pipe, result, len(batch), sound=sound)
            for i, sample in enumerate(samples):
                if write is not None and ranks.sample.context_rank == 0:
                    write(first + i, sample)
        yield samples


def _check_calls(installed: ParallelPipeline, count: int, per_call: int, inputs: Mapping[str, Any]) -> None:
    """Check `per_call`. Raises: ValueError: it is not valid with these inputs or with `stages`."""
    if per_call < 1:
        raise ValueError(f"per_call={per_call} must be at least 1")
    _check_media(inputs, per_call)
    groups = installed.ranks.data_size
    most_per_group = -(-count // groups)
    if installed.settings.stages == "release" and most_per_group > per_call:
        raise ValueError(
            f"stages='release' allows a single call, but {count} prompts over {groups} data groups need several: use "
            f"per_call={most_per_group}, or stages='offload'"
        )


def read_prompts(prompts: Sequence[Any] | Path) -> list[Any]:
    """Return a list of texts (or classes) unchanged, or a file's non-empty lines. Raises: ValueError: no prompts."""
    if isinstance(prompts, (str, Path)):
        if not os.path.isfile(prompts):  # False for texts that are too long for a path
            raise ValueError(
                f"prompts={str(prompts)!r} is not a file: must be a list of texts, or the path of a file with one "
                "prompt per line"
            )
        lines = [line.strip() for line in Path(prompts).read_text(encoding="utf-8-sig").splitlines()]
        texts: list[Any] = [line for line in lines if line]
    elif isinstance(prompts, Sequence):
        texts = list(prompts)
    else:
        raise TypeError(f"prompts must be a list of texts or the path of a file, not {prompts!r}")
    if not texts:
        raise ValueError("prompts is empty: give at least one prompt")
    return texts


def _check_inputs(pipe: Any, inputs: Mapping[str, Any]) -> str:
    """Return the name of the argument for prompts. Raises: ValueError: an input that this pipeline does not take."""
    accepted = list(inspect.signature(type(pipe).__call__).parameters)[1:]
    prompt_argument = next((name for name in ("prompt", "class_labels") if name in accepted), None)
    per_prompt = next((name for name in inputs if name.startswith("num_") and name.endswith("_per_prompt")), None)
    if prompt_argument is None:
        raise ValueError(
            f"{type(pipe).__name__} has no argument for prompts: call it directly, on every rank (its arguments: "
            f"{', '.join(accepted)})"
        )
    if per_prompt is not None and inputs[per_prompt] != 1:
        raise ValueError(
            f"{per_prompt}={inputs[per_prompt]} must be 1: to sample a prompt several times, repeat it in prompts"
        )
    reserved = [name for name in (prompt_argument, "generator") if name in inputs]
    if reserved:
        raise ValueError(f"{reserved[0]} is set by sample_prompts (from prompts and seed): leave it out")
    unknown = sorted(name for name in inputs if name not in accepted)
    if unknown:
        raise ValueError(
            f"{type(pipe).__name__} has no argument {', '.join(unknown)}; its arguments: {', '.join(accepted)}"
        )
    return prompt_argument


def _check_media(inputs: Mapping[str, Any], per_call: int) -> None:
    """Refuse media with per_call > 1, since pipelines encode them once per call, with the first sample's generator.

    Raises: ValueError: per_call > 1 with images, videos, masks or audio.
    """
    media = next((name for name, value in inputs.items() if _is_media(name, value)), None)
    if per_call > 1 and media is not None:
        raise ValueError(
            f"per_call={per_call} is not valid with {media}, which pipelines encode once per call, not per prompt: "
            "use per_call=1"
        )


def _is_media(name: str, value: Any) -> bool:
    """Return True for images, videos, audio and masks of them, but not for their settings (`video_length`)."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    words = set(name.split("_"))
    is_media_name = bool(words & _MEDIA) and not words & _TEXT and not isinstance(value, (bool, int, float, str))
    return isinstance(first, Image.Image) or (is_media_name and value is not None)


def _lyrics(pipe: Any, inputs: Mapping[str, Any], count: int) -> dict[str, list[str]]:
    """Return lyrics for each prompt, for pipelines that sing. Raises: ValueError: a list without one per prompt."""
    argument = inspect.signature(type(pipe).__call__).parameters.get(_LYRICS)
    if argument is None:
        return {}
    lyrics = inputs.get(_LYRICS, argument.default)
    if isinstance(lyrics, str):
        return {_LYRICS: [lyrics] * count}
    if not isinstance(lyrics, (list, tuple)) or len(lyrics) != count:
        raise ValueError(f"lyrics={lyrics!r} must be one text for all prompts, or a list with one for each of {count}")
    return {_LYRICS: list(lyrics)}


def _for_each(inputs: Mapping[str, Any], prompts: range) -> dict[str, Any]:
    """Return the inputs for some of the prompts; repeat a negative prompt, since many pipelines need one per prompt."""
    call_inputs = {
        name: [value] * len(prompts) if name.startswith("negative_prompt") and isinstance(value, str) else value
        for name, value in inputs.items()
    }
    return call_inputs | ({_LYRICS: inputs[_LYRICS][prompts.start : prompts.stop]} if _LYRICS in inputs else {})


def _batches(texts: list[str], share: range, size: int) -> Iterator[tuple[int, list[str]]]:
    for first in range(share.start, share.stop, size):
        yield first, texts[first : min(first + size, share.stop)]


def _gather_samples(samples: list[Any], ranks: SampleGroups) -> list[Any]:
    """All-gather the samples of all data groups, from the first rank of each group. Ranks: the whole world."""
    if not dist.is_initialized() or ranks.data_size == 1:
        return samples
    share = (ranks.data_rank, samples) if ranks.sample.context_rank == 0 else None
    gathered = gather_objects(share, dist.group.WORLD)
    shares = dict(entry for entry in gathered if entry is not None)
    return [sample for data_rank in range(ranks.data_size) for sample in shares[data_rank]]


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
