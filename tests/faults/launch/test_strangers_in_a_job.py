"""Processes that do not know the job's secret: they join the world, send requests, or write to a store."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_cp import parallelize_pipeline
from lightning_cp.config import ContextParallelConfig
from lightning_cp.errors import CacheError, JobSecretError
from lightning_cp.fabric import ContextParallelStrategy
from lightning_cp.finetune.precompute.run_state import RankError
from lightning_cp.job_secret import SECRET
from lightning_cp.launch.loopback import JobStore
from lightning_cp.mesh.groups import groups_for
from lightning_cp.pipelines.serving.plain_data import PlainData, bytes_tensor
from lightning_cp.pipelines.serving.requests import Requests
from tests.dist.lightning_ranks import fabric_of
from tests.harness import RankPool
from tests.pipelines import table


def _joined(rank: int, world: int, stranger: int) -> str:
    os.environ[SECRET] = "guess" if rank == stranger else "secret"
    try:
        groups_for(ContextParallelConfig(ring_degree=world))
    except JobSecretError as error:
        return str(error)
    finally:
        del os.environ[SECRET]
    return ""


@pytest.mark.parametrize("stranger", [0, 2])
def test_a_rank_without_the_secret_is_an_error_on_every_rank(run_ranks: RankPool, stranger: int) -> None:
    said = run_ranks(3, _joined, stranger)
    for rank, text in enumerate(said):
        others = [other for other in range(3) if (other == stranger) != (rank == stranger)]
        assert text.startswith(f"ranks {others} do not know the secret of rank {rank}: another process has taken")
    assert run_ranks(3, _joined, -1) == ["", "", ""]


def _set_up(rank: int, world: int, how: str) -> str:
    """What set-up says with a stranger in the world, if it may not unpickle what ranks send."""

    def unpickles(*_: Any, **__: Any) -> None:
        raise AssertionError("objects of other ranks are unpickled before they have proved that they know the secret")

    os.environ[SECRET] = "guess" if rank == 1 else "secret"
    gather, dist.all_gather_object = dist.all_gather_object, unpickles
    try:
        if how == "strategy":
            fabric_of(rank, world, ContextParallelStrategy(ring=world))
        else:
            parallelize_pipeline(table("flux")["flux"].make(), ContextParallelConfig(ring_degree=world))
    except JobSecretError as error:
        return str(error)
    finally:
        dist.all_gather_object = gather
        del os.environ[SECRET]
    return ""


@pytest.mark.parametrize("how", ["strategy", "pipeline"])
def test_ranks_prove_the_secret_before_they_exchange_objects(run_ranks: RankPool, how: str) -> None:
    assert all("do not know the secret of rank" in said for said in run_ranks(2, _set_up, how, init=how != "strategy"))


class Harmful:
    """An object that creates a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (f"{os.environ['HARM']}",)


def _requested(rank: int, world: int, folder: str) -> list[str]:
    """What ranks 1 and 2 say about a request of the job, the same again, one with another secret, and a pickle."""
    os.environ |= {SECRET: "secret", "HARM": folder}
    group: Any = dist.new_group(backend="gloo")
    requests, said = Requests(group), []
    good = {"name": "good"}
    if rank == 0:
        requests.send(good, PlainData.of([1]))
        requests._number = 0
        requests.send(good, PlainData.of([1]))
        os.environ[SECRET] = "guess"
        requests.send(good, PlainData.of([1]))
        data = bytes_tensor(pickle.dumps(Harmful()))
        for x in (torch.tensor([data.numel()]), data):
            dist.broadcast(x, src=0, group=group)
    else:
        for _ in range(4):
            try:
                said.append(str(requests.receive()[0]))
            except JobSecretError:
                said.append("refused")
    del os.environ[SECRET], os.environ["HARM"]
    return said


def test_followers_take_requests_of_their_job_once(run_ranks: RankPool, tmp_path: Any) -> None:
    said = run_ranks(3, _requested, str(tmp_path / "harm"))
    assert said[1:] == [["{'name': 'good'}", "refused", "refused", "refused"]] * 2
    assert not (tmp_path / "harm").exists()


def _stored(rank: int, world: int) -> list[Any]:
    os.environ[SECRET] = "secret"
    store = JobStore.shared("127.0.0.1", timeout=timedelta(seconds=20), names=["0", "1", "2"])
    assert store is not None
    if rank == 0:
        store.set("error", "true")
        store.set("0", "mine")
        store._store.set("forged", "x" * 64)
        store._store.set("1", store._store.get("0"))  # a value of another key
        store._store.set("2", '{"beat": 1}')
    dist.barrier()
    found: list[Any] = [store.get("error"), store.get_all(["0", "1", "2"])]
    with pytest.raises(JobSecretError):
        store.get("forged")
    dist.barrier()
    del os.environ[SECRET]
    return found


def test_values_of_other_processes_are_never_returned(run_ranks: RankPool) -> None:
    assert run_ranks(3, _stored) == [["true", ["mine", None, None]]] * 3


@pytest.mark.parametrize("kind", ["exec", "SystemExit", "eval", "inspect", "RankError", "__import__", "BaseException"])
def test_an_error_of_another_rank_has_a_known_class(kind: str) -> None:
    found = RankError(1, kind, "raise SystemError('ran')", "trace").exception()
    assert type(found) is RuntimeError
    assert str(found) == "raise SystemError('ran')"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (CacheError("full"), CacheError, "full"),
        (MemoryError("large"), MemoryError, "large"),
        (ValueError("of torch"), RuntimeError, "ValueError: of torch"),
        (type("CacheError", (Exception,), {})("other"), RuntimeError, "CacheError: other"),
    ],
)
def test_errors_keep_their_class_if_other_ranks_know_it(error: Exception, kind: type, text: str) -> None:
    found = RankError.of(2, error).exception()
    assert (type(found), str(found)) == (kind, text)
