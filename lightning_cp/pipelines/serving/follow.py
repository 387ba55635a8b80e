"""Many calls on one parallel pipeline: rank 0 makes them in a loop, the other ranks follow (`follow`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_cp.errors import CallFailedError
from lightning_cp.mesh.sample_groups import world_control
from lightning_cp.nest import named_leaves
from lightning_cp.pipelines.adapters import adapter_state
from lightning_cp.pipelines.equal_inputs import agreed_settings
from lightning_cp.pipelines.placement.sharding import sampling_device
from lightning_cp.pipelines.serving.leader import Leader
from lightning_cp.pipelines.serving.local_group import LocalGroup, Request, run_request
from lightning_cp.pipelines.serving.rank0_callbacks import CALLBACK, no_change
from lightning_cp.pipelines.serving.remote_group import RemoteGroup, serve
from lightning_cp.pipelines.serving.requests import Requests
from lightning_cp.pipelines.state import ParallelPipeline, parallel_state

_IDLE = timedelta(days=365)  # a follower may wait long for the next request
_log = logging.getLogger("lightning_cp")
T = TypeVar("T")


def follow(pipe: Any, loop: Callable[[Leader], T]) -> T | None:
    """Run a loop on rank 0 that calls a parallel pipeline; the other ranks take part in its calls.

    `loop(leader)` runs on rank 0 only. `leader(prompt=…)` calls the pipeline on all ranks of one data group and returns
    its result; calls may differ in size, steps and prompt. With several data groups, several threads can call `leader`
    at the same time. `leader.method("set_adapters", "style")` runs a method on all ranks.

    A call without a generator uses the random state of its data group. Those of the data groups without rank 0 are
    seeded here, so that they differ. Components of all data groups are compared here, unless check_peers="off".

    An error on any rank ends the call on all ranks of its data group: rank 0 gets its own error, or a CallFailedError
    with that of another rank, and can make the next call. An error inside an exchange between ranks, for which the
    others wait, is raised on the rank where it happened, which ends the job; `leader` raises at every later call, for
    all data groups. The same holds if a rank exits.

    Security: requests and results hold plain data only, and are sent without pickle. What a user of your service
    sends is never unpickled, unless your loop does it.

    Args:
        pipe: pipeline made parallel by `parallelize_pipeline`.
        loop: function of one argument, the `Leader`.
    Returns: the result of `loop`; None on the other ranks.
    Ranks: the whole world.
    Raises: PlanError: the pipeline is not parallel. PeerMismatchError: data groups have other components. On rank 0,
        what `loop` raises. CallFailedError: on the other ranks, if `loop` raises.
    """
    state = parallel_state(pipe)
    rank, device = dist.get_rank() if dist.is_initialized() else 0, sampling_device(state.ranks)
    groups = sorted(state.ranks.data_groups, key=lambda ranks: 0 not in ranks)  # rank 0's is the first
    groups[0] = tuple(sorted(groups[0]))  # rank 0 leads it, wherever it is in a mesh
    pairs = [(0, ranks[0]) for ranks in groups[1:]]
    if pairs:
        _compare_groups(pipe, state)
    index = next(i for i, ranks in enumerate(groups) if rank in ranks)
    if index:
        torch.manual_seed((torch.initial_seed() + index) % 2**63)
    with _channels([*groups, *pairs, *(pair[::-1] for pair in pairs)]) as channels:
        within, links = channels[: len(groups)], channels[len(groups) :]
        requests, replies = links[: len(pairs)], links[len(pairs) :]
        if rank != groups[index][0]:
            _follow(pipe, state, within[index], device)
            return None
        local = LocalGroup(pipe, state, within[index])
        if index:
            name = type(pipe).__name__
            _raise_end(serve(local, name, requests[index - 1], replies[index - 1], rank=rank, device=device))
            return None
        others = [RemoteGroup(*each, device) for each in zip(groups[1:], requests, replies, strict=True)]
        return _lead(Leader(pipe, state, [local, *others]), state, loop)


def _compare_groups(pipe: Any, state: ParallelPipeline) -> None:
    """Refuse data groups with other components: a call may run in any of them. Ranks: the world."""
    settings = state.equal_components.settings(pipe, state.transformers) | adapter_state(pipe.components)
    with agreed_settings(f"follow calls of the {type(pipe).__name__}", dict(named_leaves("", settings))):
        pass
    state.equal_components.compare_weights(pipe.components, world=world_control("components"))


@contextmanager
def _channels(members: Sequence[Sequence[int]]) -> Iterator[list[Requests]]:
    """Yield channels, each from the first of some ranks to the others, which may wait for long. Ranks: the world."""
    groups: list[Any] = [
        dist.new_group(sorted(ranks), backend="gloo", timeout=_IDLE) if len(ranks) > 1 else None for ranks in members
    ]
    yield [Requests(group, source=ranks[0]) for group, ranks in zip(groups, members, strict=True)]
    for group in groups:  # not after an error, which ends the job: others may be inside an exchange
        if group is not None:
            dist.destroy_process_group(group)


def _lead(leader: Leader, state: ParallelPipeline, loop: Callable[[Leader], T]) -> T:
    state.votes.has_leader = True
    try:
        result = loop(leader)
        leader.check_usable()  # the loop may have ignored it
    except BaseException as error:
        leader.end(error)
        raise
    finally:
        state.votes.has_leader = False
    leader.end(None)
    return result


def _follow(pipe: Any, state: ParallelPipeline, requests: Requests, device: torch.device) -> None:
    while True:
        fields, arguments = requests.receive()
        request = Request(**fields)
        if request.name is None:
            break
        try:
            with state.votes.call():
                args, kwargs = arguments.on(device)
                if request.has_callback:
                    kwargs[CALLBACK] = no_change
                run_request(pipe, request, args, kwargs)
        except Exception as error:
            if state.votes.broken is not None:
                raise
            _log.debug("rank 0's call of %s ended with %s: %s", type(pipe).__name__, type(error).__name__, error)
    _raise_end(request.error)


def _raise_end(error: str | None) -> None:
    if error is not None:
        raise CallFailedError(f"rank 0's loop ended with an error: {error}")
