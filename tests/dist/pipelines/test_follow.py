"""Many calls of rank 0 on one parallel pipeline: results, errors, and left-over state."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from diffusers.callbacks import SDXLCFGCutoffCallback
from torch import Tensor

from lightning_cp import ContextParallelConfig, parallelize_pipeline, unparallelize_pipeline
from lightning_cp.errors import CallCancelledError, CallFailedError, PeerMismatchError, PlanError
from lightning_cp.pipelines import Leader, error_votes, follow, parallel_pipeline
from lightning_cp.pipelines.serving.messages import from_bytes
from lightning_cp.undoable import intercept_calls
from tests import features
from tests.harness import RankPool
from tests.models.modes import MODES
from tests.pipelines import PIPES
from tests.pipelines.tiny import error_of

FLUX, WAN = "flux_true_cfg", "wan"


def _pipe(name: str = FLUX) -> Any:
    return PIPES[name].pipe()


def _inputs(i: int, name: str = FLUX) -> dict[str, Any]:
    """Return the arguments of call i: a different size, number of steps, prompt and noise for each."""
    given = PIPES[name].inputs()
    return {
        **given,
        "prompt": "a small red cat " * (1 + i % 3),
        "height": given["height"] + 16 * (i % 2),
        "num_inference_steps": 2 + i % 3,
        "generator": torch.Generator().manual_seed(i),
    }


def _first(result: Any) -> Tensor:
    value = next(iter(result.values()))
    return torch.as_tensor(value if isinstance(value, Tensor) else value[0])


def _calls(rank: int, world: int, which: str, cfg: int) -> Any:
    """Rank 0: the error of each call, and how many calls were divided over branches. Others: None."""
    pipe = _pipe(which)
    alone = [_first(pipe(**_inputs(i, which))) for i in range(3)]
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world // cfg), cfg=cfg)
    state = parallel_pipeline(pipe)
    assert state is not None

    def loop(leader: Leader) -> Any:
        found = []
        for i in range(3):
            inputs = _inputs(i, which)
            error = error_of(alone[i], _first(leader(**inputs)))
            assert not torch.equal(torch.Generator().manual_seed(i).get_state(), inputs["generator"].get_state())
            found.append((error, state.branch_runner.shared))
        return found

    found = follow(pipe, loop)
    unparallelize_pipeline(pipe)
    assert torch.equal(_first(pipe(**_inputs(0, which))), alone[0]), "not as before"
    return found


@pytest.mark.parametrize(("world", "which", "cfg"), [(3, FLUX, 1), (4, WAN, 2)])
@pytest.mark.default(1)
def test_calls_of_all_sizes_are_those_of_one_process(run_ranks: RankPool, world: int, which: str, cfg: int) -> None:
    first, *others = run_ranks(world, _calls, which, cfg, timeout_s=240)
    assert others == [None] * (world - 1)
    for error, shared in first:
        assert error <= 1e-5
        assert (shared > 0) == (cfg > 1)
        features.compared("many calls of a loop on rank 0 (`follow`)", error)


def _failing(rank: int, world: int) -> list[str]:
    """Rank 0: what each failed call said. After each, a call that works."""
    pipe = _pipe()
    expected = _first(pipe(**_inputs(0)))
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
    step, steps = pipe.scheduler.step, []

    def failing_step(*args: Any, **kwargs: Any) -> Any:
        steps.append(0)
        if rank == 1 and len(steps) == 2:
            raise OSError("disk of rank 1")
        return step(*args, **kwargs)

    def cancel(pipe: Any, i: int, t: Any, given: Any) -> dict[str, Any]:
        raise KeyError("cancelled by the user")

    def changes(pipe: Any, i: int, t: Any, given: Any) -> dict[str, Any]:
        return {"latents": given["latents"] * 2}

    def edits(pipe: Any, i: int, t: Any, given: Any) -> dict[str, Any]:
        given["latents"].mul_(2)
        return given

    def loop(leader: Leader) -> list[str]:
        said = []
        bad: list[dict[str, Any]] = [
            {"no_such": 1},
            {"height": -3.5},
            {"callback_on_step_end": cancel},
            {"callback_on_step_end": changes},
            {"callback_on_step_end": edits},
            {"callback_on_step_end": SDXLCFGCutoffCallback(cutoff_step_ratio=0.5)},
            {"sigmas": iter([1])},
            {"height": 10**5000},
            {"callback_on_step_end": lambda *_: leader(**_inputs(0)) and {}},
            {"prompt": "unreadable"},
        ]
        leaders.append(leader)
        for given in bad:
            with pytest.raises(Exception) as caught:  # noqa: PT011  # of all kinds
                leader(**{**_inputs(0), **given})
            said.append(f"{type(caught.value).__name__}: {caught.value}")
            if given in (bad[1], bad[2], bad[-1]):  # in the loop, in a callback, on another rank
                assert error_of(expected, _first(leader(**_inputs(0)))) <= 1e-5, "the next call fails"
        leader.method("set_progress_bar_config", disable=True)
        with pytest.raises(RuntimeError, match=r"inside follow, call leader"):
            pipe(**_inputs(0))
        with pytest.raises(ValueError, match="must be the name of a public method"):
            leader.method("_execution_device")
        return said

    def read(data: Tensor) -> Any:
        value = from_bytes(data)
        if value == "unreadable" and rank == 1:
            raise OSError("no class of this name on rank 1")
        return value

    leaders = list[Leader]()
    with mock.patch("lightning_cp.pipelines.serving.leader.from_bytes", read):
        said = follow(pipe, loop) or []
    for leader in leaders:  # rank 0's
        with pytest.raises(RuntimeError, match="the loop of follow has ended"):
            leader(**_inputs(0))
    pipe.scheduler.step = failing_step
    with pytest.raises(OSError if rank == 1 else CallFailedError, match="disk of rank 1"):
        pipe(**_inputs(1))
    del pipe.scheduler.step
    assert error_of(expected, _first(pipe(**_inputs(0)))) <= 1e-5, "the next call fails"
    return said


def test_an_error_on_one_rank_ends_this_call_on_all_ranks_only(run_ranks: RankPool) -> None:
    said = run_ranks(3, _failing, timeout_s=240)[0]
    unknown, size, cancelled, changed, edited, cutoff, unsendable, huge, inside, unreadable = said
    assert unknown.startswith("TypeError")
    assert "no_such" in unknown
    assert not size.startswith("CallFailedError")
    assert cancelled == "KeyError: 'cancelled by the user'"
    for text in (changed, edited):
        assert text.startswith("ValueError: callback_on_step_end runs on rank 0 only and must not change latents")
    assert cutoff.startswith("TypeError: callback_on_step_end is a SDXLCFGCutoffCallback, which changes the call")
    assert unsendable.startswith("TypeError: sigmas cannot be sent to other ranks, only plain data can")
    assert huge.startswith("TypeError: height cannot be sent to other ranks, only plain data can")
    assert inside.startswith("RuntimeError: leader is called inside one of its calls")
    assert unreadable.startswith("CallFailedError: rank 1 failed in this call of FluxPipeline: OSError: no class of")


def _loop_fails(rank: int, world: int) -> str:
    pipe = _pipe()
    with pytest.raises(PlanError, match="is not parallel"):
        follow(pipe, lambda leader: None)
    parallelize_pipeline(pipe, ContextParallelConfig())
    with pytest.raises(PlanError, match=r"needs one data group, but the FluxPipeline has 3: .* behind a load balancer"):
        follow(pipe, lambda leader: None)
    unparallelize_pipeline(pipe)
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))

    def loop(leader: Leader) -> None:
        leader(**_inputs(0))
        raise ValueError("the queue is gone")

    with pytest.raises((ValueError, CallFailedError)) as caught:
        follow(pipe, loop)
    with pytest.raises((PeerMismatchError, CallFailedError)):
        pipe(**_inputs(rank))  # the ranks are at one place again, and compare
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_error_of_the_loop_ends_it_on_all_ranks(run_ranks: RankPool) -> None:
    first, *others = run_ranks(3, _loop_fails, timeout_s=240)
    assert first == "ValueError: the queue is gone"
    assert set(others) == {"CallFailedError: rank 0's loop ended with an error: ValueError: the queue is gone"}


def _held(pipe: Any) -> dict[str, int]:
    """Return the state that a call could leave behind."""
    gc.collect()
    process = psutil.Process()
    modules = [x for part in pipe.components.values() if isinstance(part, torch.nn.Module) for x in part.modules()]
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "hooks": sum(len(x._forward_hooks) + len(x._forward_pre_hooks) for x in modules),
        "threads": process.num_threads() + threading.active_count(),
        "files": process.num_fds(),
        "tensors": sum(isinstance(x, Tensor) for x in gc.get_objects()),
        "forms": len(parallel_pipeline(pipe).branch_runner.forms),
        "bytes": int(process.memory_info().rss),
    }


def _leaks(rank: int, world: int, calls: int) -> list[dict[str, int]]:
    pipe, found = _pipe(), list[dict[str, int]]()
    parallelize_pipeline(pipe, MODES["ring"](world))

    def note(*_: Any) -> None:
        found.append(_held(pipe))

    pipe.note = note

    def loop(leader: Leader) -> None:
        for i in range(calls):
            if i in (calls // 2, calls - 1):
                leader.method("note")
            bad = {"callback_on_step_end": note_bad} if i % 5 == 4 else {}
            try:
                leader(**_inputs(i), **bad)
            except ZeroDivisionError:
                continue

    def note_bad(*_: Any) -> dict[str, Any]:
        raise ZeroDivisionError

    follow(pipe, loop)
    return found


@pytest.mark.full
def test_calls_leave_nothing_behind(run_ranks: RankPool) -> None:
    for half, full in run_ranks(3, _leaks, 14, timeout_s=300):
        grown = {name: full[name] - half[name] for name in half}
        print(grown)
        assert grown.pop("bytes") < 8e6
        assert grown.pop("tensors") <= 4
        assert not any(grown.values()), grown


def _fails_inside(rank: int, world: int) -> None:
    error_votes._GRACE_S = 1.0  # this process makes no further call
    pipe = _pipe()
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
    if rank == 1:

        def lose(*_: Any) -> None:
            raise OSError("out of memory on rank 1")

        pipe.transformer.transformer_blocks[0].ff.register_forward_hook(lose)

    def loop(leader: Leader) -> None:
        while True:
            try:
                leader(**_inputs(0))
            except CallFailedError:  # a loop that goes on whatever happens
                time.sleep(0.01)

    follow(pipe, loop)


@pytest.mark.full  # the other ranks wait for the time-out of their exchange
def test_an_error_inside_an_exchange_ends_the_job_with_its_cause(run_ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"(?s)out of memory on rank 1.*This rank failed inside an exchange"):
        run_ranks(3, _fails_inside, timeout_s=240)


def _exits(rank: int, world: int) -> None:
    """Rank 1 exits in the second call."""
    pipe = _pipe()
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
    steps = list[int]()

    def exit_in_second_call(*_: Any) -> None:
        steps.append(0)
        if rank == 1 and len(steps) == 5:  # a call has 2 steps of 2 forwards
            os._exit(3)

    pipe.transformer.transformer_blocks[0].ff.register_forward_hook(exit_in_second_call)

    def loop(leader: Leader) -> None:
        leader(**_inputs(0))
        with pytest.raises(CallFailedError) as lost:
            leader(**_inputs(0))
        with pytest.raises(RuntimeError) as unusable:
            leader(**_inputs(0))
        raise ValueError(f"LOST: {lost.value} UNUSABLE: {unusable.value}")

    follow(pipe, loop)


def test_a_rank_that_exits_ends_the_job_with_its_cause(run_ranks: RankPool) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(3, _exits, timeout_s=120)
    report = str(caught.value)
    assert "ValueError: LOST: the connection to another rank broke in this call of FluxPipeline" in report
    assert "UNUSABLE: this FluxPipeline can make no further call, because an earlier one failed inside" in report
    assert "exit code 3" in report


def _conditions(rank: int, world: int) -> tuple[Any, str]:
    """The error of a call with conditions of their own class; what a call without `follow` raises if they differ."""
    inputs = lambda: PIPES["ltx_condition"].inputs() | {"generator": torch.Generator().manual_seed(1)}  # noqa: E731
    pipe = _pipe("ltx_condition")
    alone = _first(pipe(**inputs()))
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
    error = follow(pipe, lambda leader: error_of(alone, _first(leader(**inputs()))))
    other = inputs()
    if rank == 1:
        other["conditions"][0].image.putpixel((0, 0), (1, 2, 3))
    with pytest.raises(PeerMismatchError) as caught:
        pipe(**other)
    return error, str(caught.value)


def test_conditions_are_sent_and_compared(run_ranks: RankPool) -> None:
    results = run_ranks(2, _conditions)
    assert results[0][0] <= 1e-5
    assert all("but conditions[0].image has a Image RGB (160, 96) " in said for _, said in results)


def _threads(rank: int, world: int) -> list[Any]:
    """Rank 0: the errors of calls of two threads. All: what a second thread raises without `follow`."""
    pipe, other = _pipe(), _pipe()
    alone = _first(pipe(**_inputs(0)))
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
    parallelize_pipeline(other, ContextParallelConfig(ring_degree=world))
    barrier, found = threading.Barrier(2), list[Any]()

    def loop(leader: Leader) -> None:
        def request() -> None:
            barrier.wait()
            found.append(error_of(alone, _first(leader(**_inputs(0)))))

        threads = [threading.Thread(target=request) for _ in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    follow(pipe, loop)

    def second(called: Any) -> str:
        """Call it from another thread, in the middle of a call of `pipe`."""
        said = list[str]()

        def run(*_: Any) -> dict[str, Any]:
            def call() -> None:
                try:
                    called(**_inputs(0))
                except RuntimeError as error:
                    said.append(str(error))

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            return {}

        pipe(**_inputs(0), callback_on_step_end=run)
        return said[0]

    return [*found, second(pipe), second(other), error_of(alone, _first(other(**_inputs(0))))]


def test_threads_share_the_leader_and_without_it_only_one_of_them_calls(run_ranks: RankPool) -> None:
    (one, two, *refused), others = run_ranks(2, _threads)
    assert max(one, two) <= 1e-5
    for same, different, error in (refused, others):
        for said in (same, different):
            assert said.startswith("FluxPipeline is called while the thread MainThread is in a call")
        assert error <= 1e-5


def _cancelled(rank: int, world: int, settings: dict[str, int]) -> list[str]:
    """Rank 0: what cancelled calls and those over their limit raise; each is followed by one that works."""
    pipe = _pipe()
    inputs = _inputs(0) | {"num_inference_steps": 20}
    alone = _first(pipe(**_inputs(1)))
    parallelize_pipeline(pipe, ContextParallelConfig(), **settings)

    def loop(leader: Leader) -> list[str]:
        said = list[str]()

        def call(**others: Any) -> None:
            with pytest.raises(CallCancelledError) as caught:
                leader(**inputs, **others)
            said.append(str(caught.value))

        leader.cancel()  # no call is running
        assert error_of(alone, _first(leader(**_inputs(1)))) <= 1e-5
        steps = list[int]()
        call(callback_on_step_end=lambda pipe, i, t, given: steps.append(i) or leader.cancel() or {})
        assert steps == [0], "it ends before the next forward"
        assert error_of(alone, _first(leader(**_inputs(1)))) <= 1e-5
        with leader.time_limit(0.3):
            call(callback_on_step_end=lambda pipe, i, t, given: time.sleep(0.1) or {})
            inside, done = threading.Event(), threading.Event()
            wait = lambda pipe, i, t, given: inside.set() or (done.wait() and {})  # noqa: E731
            other = threading.Thread(target=lambda: leader(**_inputs(1), callback_on_step_end=wait))
            other.start()
            inside.wait()
            call()
            done.set()
            other.join()
        assert error_of(alone, _first(leader(**_inputs(1)))) <= 1e-5
        with pytest.raises(ValueError, match="must be a positive number of seconds"), leader.time_limit(0):
            pass
        return said

    return follow(pipe, loop) or []


@pytest.mark.parametrize(("world", "settings"), [(2, {"cfg": 2}), (2, {"pipe": 2})])
@pytest.mark.default(1)
def test_calls_are_cancelled_and_have_a_time_limit(run_ranks: RankPool, world: int, settings: dict[str, int]) -> None:
    cancelled, too_long, waited = run_ranks(world, _cancelled, settings)[0]
    assert cancelled == "the call was cancelled"
    assert too_long == "the call has taken longer than its limit of 0.3 s"
    assert waited == "other calls have taken longer than this call's limit of 0.3 s"


def _cancelled_while_steps_overlap(rank: int, world: int) -> tuple[str, int] | None:
    """Rank 0: what a call raises that is cancelled in its 9th forward, and the number of its forwards."""
    pipe = _pipe()
    parallelize_pipeline(pipe, ContextParallelConfig(), pipe=world, patches=2)
    forwards = list[int]()

    def loop(leader: Leader) -> tuple[str, int]:
        def count(call: Any, args: Any, kwargs: Any) -> Any:
            forwards.append(0)
            if len(forwards) == 9:
                leader.cancel()
            return call(*args, **kwargs)

        inputs = lambda: _inputs(0) | {"num_inference_steps": 8}  # noqa: E731
        expected = [_first(leader(**inputs())) for _ in range(3)]  # they find out that steps can overlap
        undo = intercept_calls(pipe.transformer.transformer_blocks[0], count)
        with pytest.raises(CallCancelledError) as caught:
            leader(**inputs())
        undo()
        assert error_of(expected[0], _first(leader(**inputs()))) <= 1e-5
        return str(caught.value), len(forwards)

    return follow(pipe, loop)


@pytest.mark.full
def test_a_call_whose_steps_overlap_is_cancelled_before_its_next_forward(run_ranks: RankPool) -> None:
    said, forwards = run_ranks(2, _cancelled_while_steps_overlap)[0]
    assert said == "the call was cancelled"
    assert forwards == 9  # of 1 + 7 * 2


def _interrupted(rank: int, world: int) -> tuple[list[str], float]:
    pipe, said = _pipe(), []
    expected = _first(pipe(**_inputs(0)))
    config = ContextParallelConfig(ring_degree=world)
    parallelize_pipeline(pipe, config)
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PlanError) as caught:
            refused(pipe)
        said.append(str(caught.value))
    copied = copy.copy(pipe)
    assert copied.transformer is pipe.transformer

    def interrupt(*_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe(**_inputs(0), callback_on_step_end=interrupt)
    with pytest.raises(RuntimeError) as unusable:
        pipe(**_inputs(0))
    said.append(str(unusable.value))
    unparallelize_pipeline(pipe)
    assert copy.deepcopy(pipe).transformer is not pipe.transformer
    parallelize_pipeline(pipe, config)
    return said, error_of(expected, _first(pipe(**_inputs(0))))


def test_after_ctrl_c_on_all_ranks_the_pipeline_can_be_made_parallel_again(run_ranks: RankPool) -> None:
    for (deep, pickled, unusable), error in run_ranks(3, _interrupted):
        assert deep == pickled
        assert "cannot be copied or pickled, because its ranks share process groups: call unparallelize" in deep
        assert "if all ranks were interrupted, call unparallelize_pipeline and parallelize_pipeline" in unusable
        assert error <= 1e-5
