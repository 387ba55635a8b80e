"""Scaling tables: their rows, up to which degree more ranks pay, and their settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch import nn

from lightning_cp.app.planning import scaling
from lightning_cp.app.planning.limits import limits_of
from lightning_cp.app.planning.scaling import Scaling, markdown, scale, write
from lightning_cp.app.planning.settings import scaling_of
from lightning_cp.app.runs.command import conf_dir
from lightning_cp.app.settings.table import SettingsError
from lightning_cp.planning.devices import device_named
from lightning_cp.planning.layouts import Task
from lightning_cp.planning.models import PlannedModel
from lightning_cp.planning.request import Choice, Excluded, Plan, Request
from lightning_cp.planning.step import Layout
from lightning_cp.planning.timeline import Times

_H100 = device_named("h100")


def _plan(ranks: int, *choices: Choice, task: Task = "sample") -> Plan:
    request = Request(PlannedModel("m", nn.Identity, {}, tokens=1000), ranks, _H100, task=task)
    excluded = () if choices else (Excluded(Layout(data=ranks), "needs 90 GB of 80 GB", 88e9),)
    return Plan(request, choices, len(choices), excluded, "")


def _choice(layout: Layout, seconds: float, bound: str = "compute") -> Choice:
    times = Times(seconds, {"compute": 0.0, bound: seconds})
    return Choice(layout, times, seconds, {"weights": 10**9}, 1, {})


def _scaling() -> Scaling:
    two = _choice(Layout(ulysses=2), 8.0), _choice(Layout(ring=2), 9.0)
    four = _choice(Layout(ulysses=4), 4.0), _choice(Layout(ring=4), 8.0, "ring")
    eight = _choice(Layout(ulysses=8), 3.8, "host"), _choice(Layout(ring=2, ulysses=4), 3.9, "host")
    return Scaling(_H100, (_plan(1), _plan(2, *two), _plan(4, *four), _plan(8, *eight)))


def test_rows_have_the_fastest_layout_and_the_speed_up_over_the_fewest_ranks_that_fit() -> None:
    rows = list(_scaling().rows())
    assert rows[0][1:3] == ("1", "none fits: 10 GB more")
    assert [row[1:] for row in rows[1:]] == [
        ("2", "ulysses 2", "3.0", "8", "1", "compute 100%"),
        ("4", "ulysses 4", "3.0", "4", "2", "compute 100%"),
        ("8", "ulysses 8", "3.0", "3.8", "2.11", "host 100%"),
    ]


def test_layouts_that_differ_in_data_ranks_only_share_a_row() -> None:
    best = [Layout(ring=2), Layout(data=2, ring=2), Layout(data=4, ring=2)]
    plans = [_plan(x.ranks, _choice(x, 8.0)) for x in best]
    assert [row[1:] for row in Scaling(_H100, (_plan(1), *plans)).rows()] == [
        ("1", "none fits: 10 GB more", "", "", "", ""),
        ("2–8", "ring 2 (ranks above 2 sample other prompts)", "3.0", "8", "1", "compute 100%"),
    ]
    times = [(8.0, "compute"), (4.0, "compute"), (2.0, "world")]
    trained = [_choice(x, *time) for x, time in zip(best, times, strict=True)]
    plans = [_plan(x.layout.ranks, x, task="train") for x in trained]
    assert [row[1:] for row in Scaling(_H100, tuple(plans)).rows()] == [
        ("2–4", "data 1–2 × ring 2", "3.0", "8–4", "1–2", "compute 100%"),
        ("8", "data 4 × ring 2", "3.0", "2", "4", "world 100%"),
    ]


def test_limits_name_the_first_degree_that_gives_less_than_15_percent() -> None:
    assert [str(x) for x in _scaling().limits()] == [
        "ulysses pays up to 4: 8 is 1.05 times as fast (bound: host)",
        "ring pays up to 2: 4 is 1.12 times as fast (bound: ring)",
        "ranks pays up to 4: 8 is 1.05 times as fast (bound: host)",
    ]


def test_a_degree_that_pays_again_with_more_nodes_is_no_limit() -> None:
    """Nor does it count what ranks gain that sample other prompts."""
    seconds = {2: 8.0, 4: 7.9, 8: 4.0, 16: 3.9, 32: 3.8}
    plans = [_plan(n, _choice(Layout(data=n), s, "world"), task="train") for n, s in seconds.items()]
    assert [x.cell for x in limits_of(plans)] == ["8 (16: × 1.03, world)"] * 2
    best = _choice(Layout(ring=2), 8.0), _choice(Layout(data=2, ring=2), 8.0)
    plans = [_plan(2, best[0]), _plan(4, best[1], _choice(Layout(ring=4), 10.0, "host"))]
    assert [str(x) for x in limits_of(plans)] == [
        f"{name} pays up to 2: 4 is 0.80 times as fast (bound: host)" for name in ("ring", "ranks")
    ]


def test_a_table_of_sampling_ends_where_more_ranks_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: 8.0, 2: 4.0, 4: 3.9, 8: 3.8, 16: 0.1}

    def plan(request: Request, runs: object, *, advise: bool) -> Plan:
        return _plan(request.ranks, _choice(Layout(ring=request.ranks), seconds[request.ranks]))

    monkeypatch.setattr(scaling, "plan", plan)
    request = Request(PlannedModel("m", nn.Identity, {}), 1, _H100, task="sample")
    assert [x.request.ranks for x in scale(request, [_H100], [16, 1, 2, 4, 8])[0].plans] == [1, 2, 4, 8]
    train = scale(replace(request, task="train"), [_H100], [*seconds])
    assert [x.request.ranks for x in train[0].plans] == [*seconds]


def test_files_are_written(tmp_path: Path) -> None:
    found = [_scaling(), Scaling(_H100, (_plan(1), _plan(2)))]
    write(found, tmp_path)
    assert {x.name for x in tmp_path.iterdir()} == {"scaling.json", "scaling.md", "scaling.png"}
    text = markdown(found)
    assert (tmp_path / "scaling.md").read_text(encoding="utf-8") == text
    assert text.startswith("### m, sample, 1,000 tokens, batch 1\n")
    assert "| H100 80 GB | 4 | ulysses 4 | 3.0 | 4 | 2 | compute 100% |" in text


def _config(*overrides: str) -> DictConfig:
    with initialize_config_dir(conf_dir("plan"), version_base="1.3"):
        return compose("plan", overrides=["model=wan_tiny", *overrides])


def test_lists_of_ranks_and_devices_make_a_table() -> None:
    assert scaling_of(_config("ranks=4", "gpu=h100")) is None
    several = scaling_of(_config("ranks=[1,4]", "gpu.name=[l40s,h100]", "gpu.call_us=3"))
    assert several is not None
    request, devices, ranks = several
    assert (request.ranks, ranks) == (1, [1, 4])
    assert [(x.memory_gb, x.call_us) for x in devices] == [(48, 3), (80, 3)]
    one = scaling_of(_config("ranks=[2]", "gpu=h100"))
    assert one is not None
    assert one[1] == [_H100]


def test_tables_are_settings() -> None:
    for name, task, lora in (("train", "train", None), ("lora", "train", 16), ("sample", "sample", None)):
        found = scaling_of(_config(f"table={name}"))
        assert found is not None
        request, devices, ranks = found
        assert (request.task, request.lora and request.lora.rank) == (task, lora)
        assert [x.memory_gb for x in devices] == [24, 48, 80]
        assert ranks == [2**n for n in range(11)]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ranks=[]", r"ranks=\[\] must have at least one entry"),
        ("ranks=[1,0]", "ranks=0 must be an integer of at least 1"),
        ("gpu.name=[]", r"gpu.name=\[\] must have at least one entry"),
        ("gpu.name=[h100,x100]", "gpu=x100 is not in the table of devices"),
    ],
)
def test_invalid_lists_are_refused(setting: str, message: str) -> None:
    gpu = [] if "gpu" in setting else ["gpu=h100"]
    with pytest.raises((SettingsError, ValueError), match=message):
        scaling_of(_config(setting, *gpu))
