"""Compare a pipeline's settings between all ranks, and arguments and results of a call between those of a sample.

Before a call, their random states are made equal too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from lightning_cp.comm.agree import first_difference, gather_objects, raise_on_all
from lightning_cp.comm.background import gather_device, gather_in_background
from lightning_cp.engine.peers.comparison import Digest, digest, digest_difference
from lightning_cp.engine.peers.samples import SAMPLES, Sampler, sampled_difference
from lightning_cp.errors import PeerMismatchError
from lightning_cp.launch.rendezvous import job_id
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.nest import dataclass_fields, named_leaves
from lightning_cp.pipelines.error_votes import Votes

_RANDOM = "generator"


def sync_rng_and_check_inputs(
    arguments: Mapping[str, Any], sample: MeshGroups, state: Mapping[str, Any] | None = None
) -> None:
    """Refuse unequal arguments of a pipeline call, and set the random states of all ranks to those of the first rank.

    Random states: each `torch.Generator` in the argument `generator`, and torch's default generators of the CPU and of
    this rank's device, which pipelines use if no generator is given. Every rank then draws the same noise as one
    process with the first rank's seeds.

    Args:
        arguments: arguments of the call, by name.
        sample: ranks that share the sample.
        state: other values that must be equal on these ranks, by name.
    Ranks: all ranks of `sample`. Raises: PeerMismatchError, on all of these ranks, with the argument's name.
    """
    if sample.context is None:
        return
    generators = _generators(arguments.get(_RANDOM))
    is_first = sample.context_rank == 0
    compared = {name: x for name, x in arguments.items() if name != _RANDOM} | dict(state or {})
    local: dict[str, Any] = {
        "arguments": dict(_digests("", compared)),
        "generators": [x.device.type for x in generators],
        "states": [x.get_state() for x in generators] if is_first else None,
        "default": _default_states() if is_first else None,
    }
    hint = ". To sample many different prompts, use lightning_cp.pipelines.sample_prompts"
    first = _gather_equal("the pipeline", local, sample, what="arguments and components", hint=hint)
    for generator, random_state in zip(generators, first["states"], strict=True):
        generator.set_state(random_state)
    _set_default_states(first["default"])


@contextmanager
def agreed_settings(what: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Run the checks of one rank in this context, then compare settings: before groups are built, which may hang.

    Args: what: what the ranks do with the settings, for errors. settings: by name.
    Ranks: the whole world, if there are several ranks.
    Raises: PeerMismatchError: the settings of another rank differ. CallFailedError: a check has failed on another rank.
    """
    world = dist.group.WORLD
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    raise_on_all(failure, f"cannot {what}", world)
    by_rank = gather_objects({"job": job_id(), **{key: repr(value) for key, value in settings.items()}}, world)
    if (difference := first_difference(by_rank, missing="not set")) is not None:
        key, rank, first, here = difference
        raise PeerMismatchError(
            f"all ranks must {what} with equal settings, but rank 0 has {key}={first} and rank {rank} has "
            f"{key}={here}: give all ranks the same value"
        )


def check_equal(name: str, arguments: Mapping[str, Any], sample: MeshGroups) -> None:
    """Refuse unequal arguments of a call of `name`. Other arguments and errors: see `sync_rng_and_check_inputs`."""
    _gather_equal(name, {"arguments": dict(_digests("", arguments)), "generators": []}, sample)


def check_equal_results(name: str, result: Any, sample: MeshGroups, votes: Votes) -> None:
    """Refuse unequal results of a pipeline's call. Votes come first, because another rank may have raised.

    Ranks: all of `sample`. Raises: PeerMismatchError.
    """
    if sample.context is None:
        return
    sampler = Sampler(["result"])
    with votes.before_exchanges(), torch.no_grad():
        arguments = {"result": list(_samples(result))}
        table, _ = sampler.table(arguments, forward=1, device=gather_device(sample.context))
        tables = gather_in_background(table.flatten(), group=sample.context).read()
    if (difference := sampled_difference(tables, sampler.names)) is not None:
        rank, problem = difference
        raise PeerMismatchError(
            f"ranks that share a sample must compute the same, but {problem} in a call of {name} (rank {rank} of this "
            "group, compared with its rank 0): callbacks and components must be equal on these ranks"
        )


def _samples(result: Any) -> Iterator[Any]:
    """Yield some elements of each tensor, array and image of a result, rounded, because each rank may decode."""
    values = getattr(result, "values", None)  # of the PipelineState of a modular pipeline
    for _, leaf in named_leaves("", values if isinstance(values, dict) else result):
        x = np.asarray(leaf) if isinstance(leaf, Image.Image) else leaf
        if isinstance(x, np.ndarray):
            x = x.reshape(-1)[:: max(1, x.size // SAMPLES)]
            x = torch.from_numpy(x.astype(np.float32)) if x.dtype.kind in "uif" else None
        elif isinstance(x, Tensor):
            x = x.detach().reshape(-1)[:: max(1, x.numel() // SAMPLES)]
        if isinstance(x, Tensor):
            yield x.bfloat16() if not x.is_complex() else torch.view_as_real(x).bfloat16()
        elif isinstance(x, (bool, int, str)):
            yield x


def _gather_equal(
    name: str, local: dict[str, Any], sample: MeshGroups, *, what: str = "arguments", hint: str = ""
) -> dict[str, Any]:
    """Gather what ranks call something with, and compare it. Returns: that of the first rank."""
    gathered = gather_objects(local, sample.context)
    first: dict[str, Any] = gathered[0]
    for rank, other in enumerate(gathered):
        different = _difference(first, other)
        if different:
            raise PeerMismatchError(
                f"ranks that share a sample must call {name} with equal {what}, but {different} (rank {rank} of "
                f"this group, compared with its rank 0): pass the same arguments on these ranks{hint}"
            )
    return first


def _difference(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    expected, actual = first["generators"], other["generators"]
    if expected != actual:
        return f"{_RANDOM} is on {expected or 'no device'} on one rank and on {actual or 'no device'} on the other"
    return digest_difference(first["arguments"], other["arguments"])


def _generators(value: Any) -> list[torch.Generator]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in values if isinstance(x, torch.Generator)]


def _default_states() -> list[Tensor]:
    """Return the random states of the CPU and, if there is one, of this rank's CUDA device."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states


def _set_default_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def _digests(name: str, value: Any) -> Iterator[tuple[str, Digest]]:
    """Yield (name, digest) for each leaf of an argument; for objects without readable content, digest the class."""
    if isinstance(value, Tensor):
        yield name, digest(value)
    elif isinstance(value, Mapping):
        for key, x in value.items():
            yield from _digests(f"{name}[{key!r}]" if name else str(key), x)
    elif isinstance(value, (list, tuple)):
        yield name, (f"{len(value)} entries", [0.0])
        for i, x in enumerate(value):
            yield from _digests(f"{name}[{i}]", x)
    elif isinstance(value, (str, int, float, bool, type(None), Path)):
        yield name, (repr(value), [0.0])
    elif isinstance(value, (np.ndarray, Image.Image)):
        kind = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"{value.mode} {value.size}"
        content = hashlib.blake2b(value.tobytes(), digest_size=6).hexdigest()
        yield name, (f"a {type(value).__name__} {kind} {content}", [0.0])
    else:
        yield name, (f"a {type(value).__qualname__}", [0.0])
        for key, x in _fields(value).items():
            yield from _digests(f"{name}.{key}", x)


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, or the configuration of an object of diffusers."""
    fields = dataclass_fields(value)
    if fields is not None:
        return fields
    config = getattr(value, "config", None)
    return {k: x for k, x in config.items() if not k.startswith("_")} if isinstance(config, Mapping) else {}
