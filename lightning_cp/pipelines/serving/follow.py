"""Many calls on one parallel pipeline: rank 0 makes them in a loop, the other ranks follow (`follow`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_cp.errors import CallFailedError, PlanError
from lightning_cp.pipelines.serving.leader import Leader, take_part
from lightning_cp.pipelines.serving.messages import Messages
from lightning_cp.pipelines.state import ParallelPipeline, parallel_state

_IDLE = timedelta(days=365)  # a follower may wait long for the next request
_log = logging.getLogger("lightning_cp")
T = TypeVar("T")


def follow(pipe: Any, loop: Callable[[Leader], T]) -> T | None:
    """Run a loop on rank 0 that calls a parallel pipeline; the other ranks take part in its calls.

    `loop(leader)` runs on rank 0 only. `leader(prompt=…)` calls the pipeline on all ranks and returns its result; calls
    may differ in size, steps and prompt. `leader.method("set_adapters", "style")` runs a method on all ranks.

    An error on any rank ends the call on all ranks: rank 0 gets its own error, or a CallFailedError with that of
    another rank, and can make the next call. An error inside an exchange between ranks, for which the others wait, is
    raised on the rank where it happened, which ends the job; `leader` raises at every later call. The same holds if a
    rank exits.

    Security: requests hold plain data only, and reading them runs no code. What a user of your service sends is never
    unpickled, unless your loop does it.

    Args:
        pipe: pipeline made parallel by `parallelize_pipeline`, with one data group.
        loop: function of one argument, the `Leader`.
    Returns: the result of `loop`; None on the other ranks.
    Ranks: the whole world.
    Raises: PlanError: the pipeline is not parallel, or has several data groups. On rank 0, what `loop` raises.
        CallFailedError: on the other ranks, if `loop` raises.
    """
    state = parallel_state(pipe)
    if state.ranks.data_size > 1:
        raise PlanError(
            f"follow needs one data group, but the {state.name} has {state.ranks.data_size}: use all ranks for a "
            "sample. Several groups are several torchruns behind a load balancer (docs/serving.md)"
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    group = dist.new_group(backend="gloo", timeout=_IDLE) if world > 1 else None
    requests = Messages(group)
    result: T | None = None
    if world == 1 or dist.get_rank() == 0:
        result = _lead(Leader(pipe, state, requests), state, loop)
    else:
        _follow(pipe, state, requests)
    if group is not None:  # not after an error, which ends the job: others may be inside an exchange
        dist.destroy_process_group(group)
    return result


def _lead(leader: Leader, state: ParallelPipeline, loop: Callable[[Leader], T]) -> T:
    state.votes.has_leader = True
    try:
        result = loop(leader)
        state.votes.check_usable()  # the loop may have ignored it
    except BaseException as error:
        leader.end(error)
        raise
    finally:
        state.votes.has_leader = False
    leader.end(None)
    return result


def _follow(pipe: Any, state: ParallelPipeline, requests: Messages) -> None:
    while (message := requests.receive())["name"] is not None:
        try:
            take_part(pipe, state, message)
        except Exception as error:
            if state.votes.broken is not None:
                raise
            _log.debug("rank 0's call of %s ended with %s: %s", state.name, type(error).__name__, error)
    if message["error"] is not None:
        raise CallFailedError(f"rank 0's loop ended with an error: {message['error']}")
