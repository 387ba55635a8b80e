"""Judgements of the stages for a GPU: losses, kernels for sampling, memory."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lightning_cp.recipes.benchmarks.gpu import host, memory, speed
from lightning_cp.recipes.benchmarks.gpu.main_job import judge_training
from lightning_cp.recipes.benchmarks.gpu.page import tables_of
from lightning_cp.recipes.benchmarks.gpu.results import Result

CONF = Path(__file__).parents[4] / "conf" / "bench"


@functools.cache
def settings(name: str) -> DictConfig:
    """The settings of `bench=name`."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("bench", [f"bench={name}"])


def _losses(factor: float = 1.0) -> list[float]:
    """360 losses with the means over ten parts of those on CPU; the last tenth is multiplied."""
    expected = list(settings("gpu").main_job.expected_losses)
    return [loss * (factor if part == 9 else 1.0) for part, loss in enumerate(expected) for _ in range(36)]


@pytest.mark.parametrize(
    ("losses", "recognised", "passed"),
    [
        (_losses(), 0.99, [True, True]),
        (_losses(1.04), 0.9, [True, True]),
        (_losses(1.06), 0.99, [True, False]),
        (_losses(0.94), 0.89, [False, False]),
        (_losses(float("nan")), 0.0, [False, False]),
        ([1.0] * 360, 0.99, [True, False]),
    ],
)
def test_a_job_is_judged_by_its_losses_and_its_samples(
    losses: list[float], recognised: float, passed: list[bool]
) -> None:
    assert [check.passed for check in judge_training("cp", losses, recognised, settings("gpu"))] == passed


@pytest.mark.full
def test_a_rehearsal_has_no_goal_for_the_losses() -> None:
    assert [check.passed for check in judge_training("cp", [9.0, 9.0], 0.0, settings("gpu_on_cpu"))] == [None]


@pytest.mark.full
def test_the_workspace_is_what_a_kernel_allocates_beyond_its_results() -> None:
    sizes = memory._Sizes(1, 2048, 4, 4, 64, torch.float32, slices=2)
    lse_bytes = 512 * 4 * 4
    for name, lse_share in (("ring alltoall", 1), ("ring allgather", 0.5), ("Ulysses", 1)):
        forward, backward = memory.workspace_bytes(name, sizes, torch.device("cpu"))
        assert lse_bytes * lse_share <= forward < 8 * sizes.unit
        assert 0 <= backward < 8 * sizes.unit
    half = memory.workspace_bytes("ring alltoall", sizes._replace(dtype=torch.bfloat16), torch.device("cpu"))
    assert half[1] > 100_000, "the CPU's kernel keeps sums in float32"


_MODES = ["ring allgather", "ring alltoall", "Ulysses", "grid", "unified", "diffusers Ulysses"]


def _host_result(**given: list[int]) -> Result:
    small = {"ranks": [], "compiled_ranks": [], "rounds": 1, "calls": 1, "blocks": 1}
    config = OmegaConf.merge(settings("host"), {"host": small | given})
    assert isinstance(config, DictConfig)
    result = Result()
    for _, measure in host.host_times(config):
        measure(result)
    return result


@pytest.mark.full
def test_host_time_is_measured_in_every_mode_beside_diffusers() -> None:
    result = _host_result(ranks=[4])
    calls, blocks = tables_of({"": result}).values()
    assert [row[0] for row in calls[1:]] == _MODES
    assert [row[0] for row in blocks[1:]] == ["one process", *_MODES]
    assert all(float(row[1].replace(",", "")) > 0 for row in calls[1:])
    assert calls[-1][2] == "1.00"
    assert not result.checks, "goals are for 2 and 8 ranks"


def test_a_long_context_that_does_not_fit_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    given = OmegaConf.merge(settings("gpu_on_cpu"), {"long_context": {"lengths": [64, 128]}})
    assert isinstance(given, DictConfig)
    bound, result = speed.long_context_bytes(given.attention, 64), Result()
    monkeypatch.setattr(speed, "free_bytes", lambda device: bound)
    for _, measure in speed.long_contexts(given):
        measure(result)
    ((_, *rows),) = tables_of({"": result}).values()
    modes = ["one call: its queries", "ring allgather", "ring alltoall"]
    assert [row[:2] for row in rows[:3]] == [["64", mode] for mode in modes]
    assert rows[0][3] == "1.000"
    assert all(float(row[4]) >= 0 for row in rows[:3])
    assert rows[3][1] == "not measured: may need 0.0 GB of memory, 0.0 GB are free"
    assert all(check.passed is None for check in result.checks), "goals are for a GPU"


def test_the_longest_context_fits_in_80_gb() -> None:
    given = settings("gpu")
    assert speed.long_context_bytes(given.attention, max(given.long_context.lengths)) < 78e9


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_host_time_of_compiled_blocks_is_measured_in_every_mode() -> None:
    ((_, *rows),) = tables_of({"": _host_result(compiled_ranks=[4])}).values()
    assert [row[0] for row in rows] == ["one process", *_MODES]
