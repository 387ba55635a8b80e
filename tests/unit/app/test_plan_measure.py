"""recipes/plan.py measure=n: what is measured, what decides, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_cp.app.planning import measure
from lightning_cp.app.planning.measure import StoppedError, check_measure, measured
from lightning_cp.app.planning.ranks import Measured
from lightning_cp.app.planning.report import as_json, notes
from lightning_cp.app.planning.validation import Row, Validation, markdown, summary
from lightning_cp.app.settings.table import SettingsError
from lightning_cp.launch import Failure, FailureKind, Machine
from lightning_cp.planning.devices import DEVICES
from lightning_cp.planning.models import PlannedModel
from lightning_cp.planning.request import Choice, Plan, Request
from lightning_cp.planning.step import Layout
from lightning_cp.planning.timeline import Times

REQUEST = Request(PlannedModel("m", torch.nn.Identity, {}), 4, DEVICES["cpu"])
LAYOUTS = [Layout(ulysses=4), Layout(ring=4), Layout(ring=2, ulysses=2), Layout(data=4), Layout(data=2, ring=2)]
OUT_OF_MEMORY = Failure(1, FailureKind.RAISED, "OutOfMemoryError: CUDA out of\nmemory")


def _plan(sample_s: float = 1.0) -> Plan:
    choices = [Choice(x, Times(1.0, {"compute": 1.0}), sample_s, {"weights": 1}, 1, {}) for x in LAYOUTS]
    return Plan(REQUEST, tuple(choices), 1, (), "predicted")


def _measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: dict[Layout, Any], number: int) -> Plan:
    def run(cases: Any, ranks: int, logs: Path, **_: Any) -> Any:
        assert ranks == 4
        (layout,) = cases[0].layouts
        answer = answers[layout]
        return answer if isinstance(answer, Failure) else Measured([[[answer, 9.0, answer, answer, answer]]])

    monkeypatch.setattr(measure, "run_on_ranks", run)
    return measured(_plan(), number, OmegaConf.create({}), tmp_path, lambda _: None)


def test_the_fastest_measured_layout_is_chosen_and_one_that_fails_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = {LAYOUTS[0]: 2.0, LAYOUTS[1]: OUT_OF_MEMORY, LAYOUTS[2]: 1.2, LAYOUTS[3]: 1.5}
    found = _measured(monkeypatch, tmp_path, times, 3)
    assert [x.layout for x in found.choices] == [LAYOUTS[i] for i in (2, 3, 0, 1, 4)]
    assert [x.measured_s for x in found.choices] == [1.2, 1.5, 2.0, None, None]
    assert found.reason.startswith("ring 2 × ulysses 2: the fastest of 3 measured layouts, 1,200.0 ms a step")
    assert found.reason.endswith("predictions alone chose ulysses 4")
    assert "ring 4 failed: OutOfMemoryError: CUDA out of memory" in notes(found)
    first, *_, failed, _ = as_json(found)["choices"]
    assert (first["step_s"], first["measured_s"], first["failure"]) == (1.0, 1.2, None)
    assert failed["failure"] == "OutOfMemoryError: CUDA out of memory"


def test_of_measured_layouts_within_5_percent_the_simplest_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = _measured(monkeypatch, tmp_path, {LAYOUTS[0]: 1.04, LAYOUTS[1]: 1.06, LAYOUTS[2]: 1.0}, 3)
    assert found.choices[0].layout == LAYOUTS[0]
    assert found.equal == 2
    assert "the simplest of 2 within 5 % of the fastest of 3 measured layouts" in found.reason


def test_if_all_fail_the_prediction_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = _measured(monkeypatch, tmp_path, dict.fromkeys(LAYOUTS, OUT_OF_MEMORY), 2)
    assert [x.layout for x in found.choices] == LAYOUTS
    assert [bool(x.failure) for x in found.choices] == [True, True, True, True, False]
    assert found.reason == "predicted"


def test_a_signal_ends_the_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stopped = Failure(-1, FailureKind.STOPPED, "stopped by signal 2", exit_code=130)
    with pytest.raises(StoppedError, match="stopped by signal 2") as caught:
        _measured(monkeypatch, tmp_path, dict.fromkeys(LAYOUTS, stopped), 2)
    assert caught.value.exit_code == 130


@pytest.mark.parametrize(
    ("number", "gpus", "changes", "message"),
    [
        (-1, 0, {}, "measure=-1 must be an integer of at least 0"),
        (True, 0, {}, "measure=True must be an integer of at least 0"),
        (3, 0, {"device": DEVICES["h100"]}, r"gpu=H100 80 GB is no device of it \(cpu\)"),
        (3, 2, {}, r"gpu=CPU core is no device of it \(cuda\)"),
        (3, 2, {"device": DEVICES["h100"]}, "ranks=4, but this machine has 2 GPUs"),
        (3, 4, {"device": DEVICES["h100"]}, "runs on this machine, an a100: use gpu=auto instead of h100"),
        (3, 0, {"ranks": 99}, "ranks=99, but this machine has 2 cores, for at most 16 ranks"),
    ],
)
def test_what_this_machine_cannot_run_is_refused(
    number: Any, gpus: int, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(cores=2)
    machine.__dict__["gpus"] = gpus
    monkeypatch.setattr(Machine, "this", lambda: machine)
    monkeypatch.setattr(measure, "describe_gpu", lambda: ("NVIDIA A100-SXM4-80GB", 80 << 30))
    with pytest.raises(SettingsError, match=message):
        check_measure(number, replace(REQUEST, **changes))
    check_measure(0, replace(REQUEST, **changes))


def test_the_page_of_bench_planning_has_errors_and_the_cost_of_the_first_choice() -> None:
    measured_s = (1.0, 2.0, 0.8)
    rows = [
        Row("wan", "train", replace(choice, measured_s=seconds))
        for choice, seconds in zip(_plan().choices, measured_s, strict=False)
    ]
    result = Validation(rows, [DEVICES["cpu"]], [0.1, 0.2])
    assert result.median_error == pytest.approx(0.25)  # 0 %, -50 %, +25 %
    ((first, cost),) = result.costs().values()
    assert (first.choice.layout, cost) == (LAYOUTS[0], pytest.approx(1.25))
    assert "3 configurations: median error 25% (goal: at most 20%), 1 within 20%, largest 50%." in summary(result)
    assert "| wan | train | 4 | ring 4 | 1000 | 2000 | -50% |" in markdown(result)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_plan_with_sharded_weights_says_that_hsdp_is_not_planned(sharded: bool) -> None:
    plan = _plan()
    choices = tuple(replace(x, layout=replace(x.layout, sharded=sharded)) for x in plan.choices)
    said = any("not planned: HSDP (replicate above 1)" in x for x in notes(replace(plan, choices=choices)))
    assert said == sharded
