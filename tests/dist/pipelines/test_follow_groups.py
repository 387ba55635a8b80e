"""Calls of rank 0 in several data groups at once: results, queue, errors, cancellation, and the end of a rank."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from lightning_cp.errors import CallCancelledError, CallFailedError, PeerMismatchError
from lightning_cp.pipelines import Leader, error_votes, follow, use_degrees
from tests import features
from tests.harness import RankPool
from tests.pipelines import table

NAME = "flux_true_cfg"
DEGREES = {"ulysses": {"ulysses": 2}, "guided": {"cfg": 2}}
KINDS: list[dict[str, Any]] = [
    {},
    {"output_type": "pil"},
    {"output_type": "np"},
    {"output_type": "pt"},
    {"return_dict": False},
    {"output_type": "pil", "return_dict": False},
]


def _pipe() -> Any:
    torch.manual_seed(0)
    pipe = table("flux")[NAME].make()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _inputs(i: int, **others: Any) -> dict[str, Any]:
    """Return the arguments of call i: a different size, number of steps, prompt, noise and type of result for each."""
    given = table("flux")[NAME].inputs()
    return {
        **given,
        "prompt": "a small red cat " * (1 + i % 3),
        "height": given["height"] + 16 * (i % 2),
        "num_inference_steps": 2 + i % 3,
        "generator": torch.Generator().manual_seed(i),
        **KINDS[i % len(KINDS)],
        **others,
    }


def _difference(found: Any, expected: Any) -> float:
    """Return the largest relative difference of two results, which must have the same types."""
    assert type(found) is type(expected), (type(found), type(expected))
    if isinstance(expected, dict):
        assert {name: vars(found)[name] is found[name] for name in found} == dict.fromkeys(expected, True)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        return max(map(_difference, found, expected))
    if isinstance(expected, Image.Image):
        assert found.mode == expected.mode
        apart = np.abs(np.asarray(found).astype(int) - np.asarray(expected).astype(int)).max()
        return 0.0 if apart <= 1 else float(apart)
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


@contextmanager
def _home_is_busy(leader: Leader, errors: list[Exception] | None = None) -> Iterator[None]:
    """Within this context, a call is in rank 0's data group: all others run in other groups, or wait."""
    inside, done = threading.Event(), threading.Event()

    def call() -> None:
        try:
            leader(**_inputs(0), callback_on_step_end=lambda *_: inside.set() or (done.wait() and {}))
        except CallCancelledError as error:
            if errors is None:
                raise
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _meet_in_first_step(pipe: Any) -> list[int]:
    """Let the first step of the first call wait for that of all ranks. Returns: a list that each step extends."""
    step, steps = pipe.scheduler.step, list[int]()

    def meeting(*args: Any, **kwargs: Any) -> Any:
        if not steps:
            dist.barrier()
        steps.append(0)
        return step(*args, **kwargs)

    pipe.scheduler.step = meeting
    return steps


def _all_at_once(rank: int, world: int, settings: dict[str, int], degrees: dict[str, dict[str, int]], how: str) -> Any:
    """Rank 0: the error of each of 7 calls, made at once. Others: the number of their steps."""
    pipe = _pipe()
    alone = [pipe(**_inputs(i)) for i in range(7)]
    parallelize_pipeline(
        pipe, ContextParallelConfig(settings.get("ring", 1)), cfg=settings.get("cfg", 1), degrees=degrees
    )
    steps = _meet_in_first_step(pipe)

    def loop(leader: Leader) -> list[float]:
        def call(i: int) -> Any:
            with use_degrees(pipe, ["default", *degrees][i % (1 + len(degrees))]):
                return leader(**_inputs(i))

        async def tasks() -> list[Any]:
            return await asyncio.gather(*(asyncio.to_thread(call, i) for i in range(7)))

        if how == "asyncio":
            found = asyncio.run(tasks())
        else:
            with ThreadPoolExecutor(7) as pool:
                found = list(pool.map(call, range(7)))
        return [_difference(one, expected) for one, expected in zip(found, alone, strict=True)]

    errors = follow(pipe, loop)
    return errors if rank == 0 else len(steps)


@pytest.mark.parametrize(
    ("world", "settings", "degrees", "how"),
    [
        (2, {}, {}, "threads"),
        (3, {}, {}, "asyncio"),
        pytest.param(
            4, {"ring": 2}, {"ulysses": {"ulysses": 2}, "guided": {"cfg": 2}}, "threads", marks=pytest.mark.full
        ),
        pytest.param(4, {"cfg": 2}, {}, "asyncio", marks=pytest.mark.full),
        pytest.param(6, {"ring": 3}, {}, "threads", marks=pytest.mark.full),
    ],
)
def test_calls_at_the_same_time_are_those_of_one_process(
    run_ranks: RankPool, world: int, settings: dict[str, int], degrees: dict[str, dict[str, int]], how: str
) -> None:
    errors, *steps = run_ranks(world, _all_at_once, settings, degrees, how, timeout_s=240)
    assert max(errors) <= 1e-5
    assert all(steps), "a data group has made no call"
    features.compared("calls of `follow` at the same time, in several data groups", max(errors))


def _noise(rank: int, world: int) -> Any:
    """Rank 0: differences of two calls in another group with one generator; of calls in both without a generator."""
    pipe = _pipe()
    generator = torch.Generator().manual_seed(5)
    alone = [pipe(**_inputs(0, generator=generator)) for _ in range(2)]
    parallelize_pipeline(pipe, ContextParallelConfig())

    def loop(leader: Leader) -> Any:
        again = torch.Generator().manual_seed(5)
        with _home_is_busy(leader):
            found = [leader(**_inputs(0, generator=again)) for _ in range(2)]
            there = leader(**_inputs(0, generator=None))
        here = leader(**_inputs(0, generator=None))
        return [_difference(*pair) for pair in (*zip(found, alone, strict=True), (here, there))]

    return follow(pipe, loop)


def test_a_generator_draws_on_in_other_groups_and_groups_draw_different_noise(run_ranks: RankPool) -> None:
    first, second, without = run_ranks(2, _noise)[0]
    assert max(first, second) <= 1e-5
    assert without > 1e-2


def _failing(rank: int, world: int, ring: int) -> list[str]:
    """Rank 0: what failed calls in the other data group raise. After each, a call that works."""
    pipe = _pipe()
    expected = pipe(**_inputs(0))
    parallelize_pipeline(pipe, ContextParallelConfig(ring))
    step = pipe.scheduler.step

    def failing_step(*args: Any, **kwargs: Any) -> Any:
        if pipe._num_timesteps == 5 and rank == world - 1:
            raise OSError("disk of the last rank")
        return step(*args, **kwargs)

    pipe.scheduler.step = failing_step
    pipe.tag = lambda x: setattr(pipe, "tagged", x) or object()  # a result that cannot be sent
    pipe.fail = lambda: 1 / (rank < ring)

    def loop(leader: Leader) -> list[str]:
        said = list[str]()

        def note(call: Callable[[], Any], kind: type[Exception]) -> None:
            with pytest.raises(kind) as caught:
                call()
            assert type(caught.value) is kind
            said.append(str(caught.value))
            assert _difference(leader(**_inputs(0)), expected) <= 1e-5, "the next call fails"

        with _home_is_busy(leader):
            note(lambda: leader(**_inputs(0), no_such=1), CallFailedError)
            note(lambda: leader(**_inputs(0, num_inference_steps=5)), CallFailedError)
            note(lambda: leader(**_inputs(0, output_type="strange")), CallFailedError)
            note(lambda: leader(**_inputs(0, sigmas=iter([1]))), TypeError)
        note(lambda: leader.method("fail"), CallFailedError)
        assert leader.method("tag", 7) is not None
        with pytest.raises(ValueError, match="must be the name of a public method"):
            leader.method("_execution_device")
        return said

    said = follow(pipe, loop) or []
    assert pipe.tagged == 7, "a method runs on all ranks"
    return said


@pytest.mark.parametrize(("world", "ring"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)])
def test_an_error_in_another_group_ends_this_call_only(run_ranks: RankPool, world: int, ring: int) -> None:
    unknown, step, kind, unsendable, method = run_ranks(world, _failing, ring, timeout_s=240)[0]
    first, last = ring, world - 1
    assert unknown.startswith(f"rank {first} failed in this call of FluxPipeline: TypeError: ")
    assert "no_such" in unknown
    assert step == f"rank {last} failed in this call of FluxPipeline: OSError: disk of the last rank"
    assert kind.startswith(f"rank {first} failed in this call of FluxPipeline: ")
    assert unsendable.startswith("sigmas is a list_iterator, which is not sent to other ranks")
    assert method == f"rank {first} failed in this call of FluxPipeline: ZeroDivisionError: division by zero"


def _cancelled(rank: int, world: int, settings: dict[str, int]) -> list[str]:
    """Rank 0: what cancelled calls and those over their limit raise, in its data group and in the other one."""
    pipe = _pipe()
    expected = pipe(**_inputs(1))
    parallelize_pipeline(pipe, ContextParallelConfig(), **settings)
    size, step = max(settings.values(), default=1), pipe.scheduler.step

    def slow_step(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01 if pipe._num_timesteps > 100 else 0)
        return step(*args, **kwargs)

    if rank == size:
        pipe.scheduler.step = slow_step
    endless = _inputs(1, num_inference_steps=100_000)

    def loop(leader: Leader) -> list[str]:
        said, of_home = list[str](), list[Exception]()

        def call(**others: Any) -> None:
            with pytest.raises(CallCancelledError) as caught:
                leader(**endless, **others)
            said.append(str(caught.value))

        def both_groups_work() -> None:
            with _home_is_busy(leader):
                assert _difference(leader(**_inputs(1)), expected) <= 1e-5

        with _home_is_busy(leader, of_home):
            thread = threading.Thread(target=call)
            thread.start()
            while thread.is_alive():
                leader.cancel()
                thread.join(0.05)
        said.append(str(of_home[0]))
        both_groups_work()
        with _home_is_busy(leader):
            with leader.time_limit(0.3):
                call()
                call(callback_on_step_end=lambda *_: {})  # it waits for rank 0's data group
            assert _difference(leader(**_inputs(1)), expected) <= 1e-5
        both_groups_work()
        leaders.append(leader)
        leader.method("pause")  # cancelled when it cannot be interrupted any more
        both_groups_work()
        return said

    leaders = list[Leader]()  # rank 0's
    pipe.pause = lambda: [one.cancel() for one in leaders] or time.sleep(0.3)
    return follow(pipe, loop) or []


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {}),
        pytest.param(4, {"cfg": 2}, marks=pytest.mark.full),
        pytest.param(4, {"pipe": 2}, marks=pytest.mark.full),
    ],
)
def test_calls_in_all_groups_are_cancelled_and_have_a_time_limit(
    run_ranks: RankPool, world: int, settings: dict[str, int]
) -> None:
    cancelled, of_home, too_long, waited = run_ranks(world, _cancelled, settings, timeout_s=120)[0]
    assert cancelled == of_home == "the call was cancelled"
    assert too_long == "the call has taken longer than its limit of 0.3 s"
    assert waited == "other calls have taken longer than this call's limit of 0.3 s"


def _other_components(rank: int, world: int, settings: dict[str, int]) -> list[str]:
    """The errors of follow if the last data group has another weight, another scheduler, or neither."""
    pipe = _pipe()
    parallelize_pipeline(pipe, ContextParallelConfig(), **settings)
    is_last, said = rank >= world - world // 2, list[str]()

    def note() -> None:
        try:
            follow(pipe, lambda leader: None)
        except PeerMismatchError as error:
            said.append(str(error))

    note()
    scheduler = pipe.scheduler
    if is_last:
        pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config, shift=5.0)
    note()
    pipe.scheduler = scheduler
    if is_last:
        with torch.no_grad():
            next(pipe.vae.parameters()).mul_(1.5)
    note()
    return said


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {}),
        pytest.param(4, {"cfg": 2}, marks=pytest.mark.full),
        pytest.param(4, {"pipe": 2}, marks=pytest.mark.full),
    ],
)
def test_data_groups_with_other_components_are_refused(
    run_ranks: RankPool, world: int, settings: dict[str, int]
) -> None:
    for said in run_ranks(world, _other_components, settings):
        scheduler, weight = said
        rank = world - world // 2
        assert scheduler.startswith(
            "all ranks must follow calls of the FluxPipeline with equal settings, but rank 0 has scheduler['config']"
            f"['shift']=1.0 and rank {rank} has scheduler['config']['shift']=5.0"
        )
        assert weight.startswith("all ranks of follow must have equal weights, but the values of vae.")
        assert f"(rank {rank} of this group" in weight


def _in_mesh(rank: int, world: int, order: list[int]) -> float | None:
    """Rank 0: the error of two calls, one in each data group of a mesh of two rings."""
    pipe = _pipe()
    alone = [pipe(**_inputs(i)) for i in range(2)]
    mesh = DeviceMesh("cpu", torch.tensor(order).reshape(2, world // 2, 1), mesh_dim_names=("data", "ring", "ulysses"))
    parallelize_pipeline(pipe, ContextParallelConfig(mesh=mesh))

    def loop(leader: Leader) -> float:
        with _home_is_busy(leader):
            there = leader(**_inputs(0))
        here = leader(**_inputs(1))
        return max(_difference(there, alone[0]), _difference(here, alone[1]))

    return follow(pipe, loop)


@pytest.mark.parametrize("order", [[1, 0], pytest.param([1, 3, 0, 2], marks=pytest.mark.full)])
def test_rank_zero_leads_wherever_a_mesh_has_its_data_group(run_ranks: RankPool, order: list[int]) -> None:
    error, *others = run_ranks(len(order), _in_mesh, order)
    assert error <= 1e-5
    assert others == [None] * (len(order) - 1)


def _lost(rank: int, world: int, ring: int, how: str) -> None:
    """In a call of the other data group, its last rank exits, or its first one fails inside an exchange."""
    error_votes._GRACE_S = 1.0  # this process makes no further call
    pipe = _pipe()
    parallelize_pipeline(pipe, ContextParallelConfig(ring))
    if rank == (world - 1 if how == "exits" else ring):

        def lose(*_: Any) -> None:
            if how == "exits":
                os._exit(3)
            raise OSError("out of memory")

        pipe.transformer.transformer_blocks[0].ff.register_forward_hook(lose)

    def loop(leader: Leader) -> None:
        with _home_is_busy(leader):
            with pytest.raises(CallFailedError) as lost:
                leader(**_inputs(0))
            with pytest.raises(RuntimeError) as unusable:
                leader(**_inputs(0))
        with pytest.raises(RuntimeError, match="can make no further call"):  # rank 0's group was not in that call
            leader(**_inputs(0), callback_on_step_end=lambda *_: {})
        raise ValueError(f"LOST: {lost.value} UNUSABLE: {unusable.value}")

    follow(pipe, loop)


@pytest.mark.parametrize(
    ("world", "ring", "how", "lost"),
    [
        (2, 1, "exits", "the connection to another rank broke while this rank waited for a message of rank 1"),
        pytest.param(
            4, 2, "exits", "the connection to another rank broke in this call of FluxPipeline", marks=pytest.mark.full
        ),
        pytest.param(
            4, 2, "raises", "rank 2 failed in this call of FluxPipeline: OSError: out of memory", marks=pytest.mark.full
        ),
    ],
)
def test_a_group_that_loses_a_rank_ends_the_job_with_its_cause(
    run_ranks: RankPool, world: int, ring: int, how: str, lost: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(world, _lost, ring, how, timeout_s=120)
    report = str(caught.value)
    assert f"ValueError: LOST: {lost}" in report
    assert f"UNUSABLE: the data group of ranks {list(range(ring, world))} can make no further call, because" in report
    assert (
        "exit code 3" if how == "exits" else "OSError: out of memory\nThis rank failed inside an exchange"
    ) in report
