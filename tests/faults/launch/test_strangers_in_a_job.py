"""Ranks of two jobs at one port are one error; messages of lightning_cp cannot run code."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_cp import parallelize_pipeline
from lightning_cp.config import ContextParallelConfig
from lightning_cp.errors import CacheError, PeerMismatchError
from lightning_cp.fabric import ContextParallelStrategy
from lightning_cp.finetune.precompute.ranks import RankError
from lightning_cp.pipelines.serving.messages import Messages
from tests.dist.lightning_ranks import fabric_of
from tests.harness import RankPool
from tests.pipelines import PIPES


def _set_up(rank: int, world: int, how: str) -> str:
    """What set-up says if the last rank belongs to another job."""
    os.environ["SLURM_JOB_ID"] = "12" if rank == world - 1 else "11"
    try:
        if how == "strategy":
            fabric_of(rank, world, ContextParallelStrategy(ring=world))
        else:
            parallelize_pipeline(PIPES["flux"].make(), ContextParallelConfig(ring_degree=world))
    except PeerMismatchError as error:
        return str(error)
    finally:
        del os.environ["SLURM_JOB_ID"]
    return ""


@pytest.mark.parametrize("how", ["strategy", "pipeline"])
def test_two_jobs_at_one_port_are_an_error_on_every_rank(run_ranks: RankPool, how: str) -> None:
    for said in run_ranks(3, _set_up, how, init=how != "strategy"):
        assert "SLURM_JOB_ID=11" in said
        assert "SLURM_JOB_ID=12" in said
        assert "rank 2" in said


class Harmful:
    """An object that creates a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (f"{os.environ['HARM']}",)


def _requested(rank: int, world: int, folder: str) -> list[str]:
    """What ranks 1 and 2 say about a request, and about a pickle."""
    os.environ["HARM"] = folder
    group: Any = dist.new_group(backend="gloo")
    messages, said = Messages(group), []
    if rank == 0:
        messages.send(name="good")
        data = torch.frombuffer(bytearray(pickle.dumps(Harmful())), dtype=torch.uint8)
        for x in (torch.tensor([data.numel()]), data):
            dist.broadcast(x, src=0, group=group)
    else:
        said.append(str(messages.receive()))
        with pytest.raises(ValueError):  # noqa: PT011
            messages.receive()
    del os.environ["HARM"]
    return said


def test_requests_are_plain_data(run_ranks: RankPool, tmp_path: Any) -> None:
    assert run_ranks(3, _requested, str(tmp_path / "harm"))[1:] == [["{'name': 'good'}"]] * 2
    assert not (tmp_path / "harm").exists()


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
