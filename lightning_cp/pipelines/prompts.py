"""Many prompts over data groups: each is sampled by one group, and results come back in order."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image

from lightning_cp.comm.shards import shard_range
from lightning_cp.errors import PlanError
from lightning_cp.mesh import Branches
from lightning_cp.pipelines.apply import parallel_pipeline

# in the names of inputs: of pictures, clips and sounds, and of what masks texts
_MEDIA = {"image", "images", "video", "videos", "frames", "mask", "masks", "conditions", "audio", "waveforms"}
_TEXT = {"prompt", "attention"}


def sample_prompts(
    pipe: Any,
    prompts: Sequence[Any] | Path,
    *,
    seed: int = 0,
    per_call: int = 1,
    write: Callable[[int, Any], None] | None = None,
    collect: bool = True,
    **inputs: Any,
) -> list[Any]:
    """Calls a parallel pipeline with every prompt, each data group with its share of them (counts may be uneven).

    Sample i is drawn from a generator of its own, seeded with `seed + i`, so that with per_call=1 it depends neither on
    the number of groups nor on the other prompts. With more, texts of unequal length are padded together as the
    pipeline does it, which the numbers of some depend on.

    Args:
        pipe: made parallel by `parallelize_pipeline`.
        prompts: texts, or a file with one a line; the same on every rank.
        seed: of the first sample.
        per_call: prompts that a group gives its pipeline at a time; 1 with images, videos, masks or sounds.
        write: called with (number of the prompt, its sample) once for each prompt, by one rank, as soon as it is there.
        collect: whether every rank gets all samples; else each gets those of its own group.
        inputs: every other argument of the pipeline, the same for all prompts.
    Returns: samples in the order of the prompts: entries of the first field of the pipeline's result.
    Ranks: the whole world.
    Raises: ValueError: no prompts, inputs that the pipeline does not take (so many at a time), a pipeline that is not
        parallel, or a result without an entry a prompt.
    """
    installed = parallel_pipeline(pipe)
    if installed is None:
        raise PlanError(f"{type(pipe).__name__} is not parallel: call parallelize_pipeline first")
    if per_call < 1:
        raise ValueError(f"per_call={per_call} must be at least 1")
    asked = _check_inputs(pipe, inputs)
    _check_media(inputs, per_call)
    texts, ranks = read_prompts(prompts), installed.ranks
    mine, most = share_of(len(texts), ranks), -(-len(texts) // ranks.data_size)
    if installed.stages is not None and installed.stages.setting == "release" and most > per_call:
        raise ValueError(
            f"stages='release' is for a single call, and {len(texts)} prompts over {ranks.data_size} data groups need "
            f"several: use per_call={most}, or stages='offload'"
        )
    found: list[Any] = []
    for first, batch in _batches(texts, mine, per_call):
        generators = [torch.Generator().manual_seed(seed + first + i) for i in range(len(batch))]
        result = pipe(**{asked: batch}, generator=generators, **_for_each(inputs, len(batch)))
        samples = _samples(pipe, result, len(batch))
        for i, sample in enumerate(samples):
            if write is not None and ranks.sample.context_rank == 0:
                write(first + i, sample)
        found += samples
    return _everyones(found, ranks) if collect else found


def read_prompts(prompts: Sequence[Any] | Path) -> list[Any]:
    """Texts (or classes) as they are, or the lines of a file that are not empty. Raises: ValueError: there are none."""
    if isinstance(prompts, (str, Path)):
        if not os.path.isfile(prompts):  # False for texts that are too long for a path
            raise ValueError(
                f"prompts={str(prompts)!r} is no file with a prompt a line; give a list of texts, or a path"
            )
        lines = [line.strip() for line in Path(prompts).read_text(encoding="utf-8-sig").splitlines()]
        texts: list[Any] = [line for line in lines if line]
    elif isinstance(prompts, Sequence):
        texts = list(prompts)
    else:
        raise TypeError(f"prompts must be a list of texts or the path of a file, not {prompts!r}")
    if not texts:
        raise ValueError("prompts: there are none")
    return texts


def share_of(count: int, ranks: Branches) -> range:
    """The numbers of the prompts that this rank's data group samples: a contiguous share, longer ones first."""
    return shard_range(count, ranks.data_size, ranks.data_rank)


def _check_inputs(pipe: Any, inputs: Mapping[str, Any]) -> str:
    """The name of the argument that takes prompts. Raises: ValueError: what this pipeline does not take."""
    taken = list(inspect.signature(type(pipe).__call__).parameters)[1:]
    asked = next((name for name in ("prompt", "class_labels") if name in taken), None)
    several = next((name for name in inputs if name.startswith("num_") and name.endswith("_per_prompt")), None)
    if asked is None:
        raise ValueError(f"{type(pipe).__name__} takes no prompts; call it on every rank (it takes {', '.join(taken)})")
    if several is not None and inputs[several] != 1:
        raise ValueError(f"{several}={inputs[several]}: give a prompt as often as it shall be sampled instead")
    twice = [name for name in (asked, "generator") if name in inputs]
    if twice:
        raise ValueError(f"{twice[0]} is given by sample_prompts itself (prompts, seed): leave it out of the inputs")
    unknown = sorted(name for name in inputs if name not in taken)
    if unknown:
        raise ValueError(f"{type(pipe).__name__} takes no {', '.join(unknown)}; it takes {', '.join(taken)}")
    return asked


def _check_media(inputs: Mapping[str, Any], per_call: int) -> None:
    """Raises: ValueError: several prompts a call with what pipelines encode once, with the first sample's generator."""
    shown = next((name for name, value in inputs.items() if _is_media(name, value)), None)
    if per_call > 1 and shown is not None:
        raise ValueError(
            f"per_call={per_call} is not valid with {shown}, which pipelines encode once a call, not for each prompt: "
            "use per_call=1"
        )


def _is_media(name: str, value: Any) -> bool:
    """Whether an input is a picture, a clip, a sound or a mask of one; settings of these (`video_length`) are not."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    words = set(name.split("_"))
    of_media = bool(words & _MEDIA) and not words & _TEXT and not isinstance(value, (bool, int, float, str))
    return isinstance(first, Image.Image) or (of_media and value is not None)


def _for_each(inputs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The inputs of a call with `count` prompts: to many pipelines negative ones must be as many, in a list."""
    return {
        name: [value] * count if name.startswith("negative_prompt") and isinstance(value, str) else value
        for name, value in inputs.items()
    }


def _batches(texts: list[str], share: range, size: int) -> Iterator[tuple[int, list[str]]]:
    for first in range(share.start, share.stop, size):
        yield first, texts[first : min(first + size, share.stop)]


def _samples(pipe: Any, result: Any, count: int) -> list[Any]:
    """The entries of the first field of a result. Raises: ValueError: there is not one for each of `count` prompts."""
    name, values = ("entries", result[0]) if isinstance(result, tuple) else next(iter(result.items()))
    samples = list(values)
    if len(samples) != count:
        raise ValueError(
            f"{type(pipe).__name__} gave {len(samples)} {name} for {count} prompts, not one for each: use "
            f"{'per_call=1' if count > 1 else 'another output_type'}, or call the pipeline itself"
        )
    return samples


def _everyones(found: list[Any], ranks: Branches) -> list[Any]:
    """The samples of all groups, on every rank, from the first rank of each."""
    if not dist.is_initialized() or ranks.data_size == 1:
        return found
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (ranks.data_rank, found) if ranks.sample.context_rank == 0 else None)
    shares = dict(entry for entry in everyone if entry is not None)
    return [sample for data_rank in range(ranks.data_size) for sample in shares[data_rank]]
