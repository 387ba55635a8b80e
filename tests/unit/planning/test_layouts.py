"""All layouts of a number of ranks, why some are not possible, and settings of the recipes for them."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from torch import nn

from lightning_cp.launch import Machine
from lightning_cp.planning.layouts import Task, check_fixed, described, layouts, overrides_of, problem_of, simplicity
from lightning_cp.planning.models import PlannedModel
from lightning_cp.planning.step import Layout
from lightning_cp.recipes.runs.command import conf_dir
from lightning_cp.recipes.runs.recipe import check_config
from lightning_cp.recipes.runs.sampling import check_sampling

_SOURCE: dict[str, list[str]] = {"train": [], "sample": ["source=some/pipeline", "prompts=a"]}
MODEL = PlannedModel("m", nn.Identity, {}, heads=4, tokens=10)


@pytest.mark.parametrize("task", ["train", "sample"])
@pytest.mark.parametrize("ranks", [1, 6, 8])
def test_layouts_are_complete_and_different(ranks: int, task: Task) -> None:
    found = list(layouts(ranks, task))
    assert all(x.ranks == ranks for x in found)
    assert len(set(found)) == len(found)
    degrees = {(x.data, x.cfg, x.ring, x.ulysses) for x in found}
    rooms = [x for x in range(1, ranks + 1) if ranks % x == 0]
    expected = {
        (data, cfg, ring, ulysses)
        for data in rooms for cfg in (1, 2) for ring in rooms for ulysses in rooms
        if data * cfg * ring * ulysses == ranks and (task == "sample" or cfg == 1)
    }  # fmt: skip
    assert degrees == expected
    can_shard = [ranks if task == "train" else ring * ulysses for _, _, ring, ulysses in degrees]  # over so many
    assert len(found) == sum(1 if x == 1 else 2 for x in can_shard) * (3 if task == "train" else 1)


def test_fixed_degrees_restrict_the_layouts() -> None:
    found = list(layouts(8, "train", {"ring": 2, "sharded": False, "checkpointing": "none"}))
    assert [(x.data, x.ulysses) for x in found] == [(4, 1), (2, 2), (1, 4)]


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(ulysses=8), "ulysses=8 must be at most the number of heads, 4"),
        (Layout(ring=4, ulysses=4), "ring × ulysses = 16 must be at most the number of tokens, 10"),
        (Layout(cfg=2), "cfg=2 needs classifier-free guidance"),
    ],
)
def test_impossible_layouts_have_a_reason(layout: Layout, reason: str) -> None:
    assert reason in str(problem_of(layout, MODEL))


def test_possible_layouts_have_none() -> None:
    assert problem_of(Layout(data=8, ring=2, ulysses=4, sharded=True), MODEL) is None
    assert problem_of(Layout(cfg=2), PlannedModel("m", nn.Identity, {}, guided=True)) is None


@pytest.mark.parametrize(
    ("fixed", "task", "message"),
    [
        ({"cfg": 2}, "train", "fixed.cfg=2 is for task=sample"),
        ({"checkpointing": "full"}, "sample", "is for task=train"),
        ({"rings": 2}, "train", "fixed.rings cannot be planned"),
    ],
)
def test_contradicting_degrees_are_refused(fixed: dict[str, Any], task: Task, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_fixed(fixed, task)


@pytest.mark.parametrize("task", ["train", "sample"])
@pytest.mark.full
def test_the_settings_of_every_layout_are_valid(task: Task) -> None:
    for layout in (*layouts(1, task), *layouts(4, task)):
        settings = overrides_of(layout, task, batch_size=2)
        with initialize_config_dir(conf_dir(), version_base="1.3"):
            config = compose(task, overrides=[*settings, "run_dir=/runs/here", *_SOURCE[task]])
        check = check_config if task == "train" else check_sampling
        found = check(config, Machine(cores=8), None).config
        assert (found.ring, found.ulysses) == (layout.ring, layout.ulysses)
        assert found.data_parallel == layout.data
        if task == "train":
            assert found.activation_checkpointing == layout.checkpointing
            assert ("FSDP" in found.strategy["_target_"]) is layout.sharded
        else:
            assert (found.cfg, list(found.shard) != []) == (layout.cfg, layout.sharded)


def test_simpler_layouts_come_first() -> None:
    simple = [
        Layout(data=8),
        Layout(data=8, checkpointing="full"),
        Layout(data=8, sharded=True),
        Layout(data=4, ulysses=2),
        Layout(data=4, ring=2),
        Layout(ring=2, ulysses=4),
    ]
    given = [simple[i] for i in (3, 0, 5, 2, 4, 1)]
    assert sorted(given, key=simplicity) == simple
    assert described(Layout(data=2, ring=2, sharded=True, checkpointing="full")) == (
        "data 2 × ring 2, sharded, full checkpointing"
    )
    assert described(Layout()) == "one rank"
