"""If nothing fits: the order of the changes, the first that fits, and the line that names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_cp.planning.changes import Change, changes, what_is_missing
from lightning_cp.planning.devices import device_named
from lightning_cp.planning.models import PlannedModel
from lightning_cp.planning.pipeline.components import Component, Pipeline
from lightning_cp.planning.request import Excluded, Request
from lightning_cp.planning.step import Layout

_MODEL = PlannedModel("m", torch.nn.Identity, {})
_REQUEST = Request(_MODEL, 2, device_named("h100"), batch_size=3)
_TRAIN = replace(_REQUEST, of_one_sample=lambda: replace(_REQUEST, batch_size=1))
_SAMPLE = replace(_TRAIN, task="sample", pipeline=Pipeline((Component("vae", "decode", torch.nn.Identity()),)))
_RANKS = ["ranks=4", "ranks=8", "ranks=16", "ranks=32"]


@pytest.mark.parametrize(
    ("request_", "can_checkpoint", "names"),
    [
        (_TRAIN, True, ["mlp_tiles=auto", "batch_size=1", "lora.rank=16"]),
        (replace(_TRAIN, fixed={"sharded": False}), False, ["", "batch_size=1", "lora.rank=16"]),
        (replace(_TRAIN, mlp_tiles=4, of_one_sample=None), True, ["lora.rank=16"]),
        (_SAMPLE, True, ["stages=offload", "batch_size=1"]),
        (replace(_SAMPLE, stages="release"), True, ["batch_size=1"]),
    ],
)
def test_cheap_changes_come_first(request_: Request, can_checkpoint: bool, names: list[str]) -> None:
    found = list(changes(request_, Layout(ring=2), can_checkpoint=can_checkpoint))
    assert [x.name for x in found] == [*names, *_RANKS]
    level = "full" if request_.task == "train" and can_checkpoint else "none"
    assert all(x.layout.sharded and x.layout.checkpointing == level for x in found)
    assert all(x.layout.ranks == x.request.ranks for x in found)


def test_the_first_change_that_fits_is_named() -> None:
    excluded = [
        Excluded(Layout(data=2), "needs", 90e9, "decode"),
        Excluded(Layout(data=2, sharded=True), "needs", 99e9),
    ]
    tried: list[str] = []

    def fits(change: Change) -> bool:
        tried.append(change.name)
        return change.request.batch_size == 1

    def reason(given: Any) -> str:
        return what_is_missing(_SAMPLE, excluded, given, can_checkpoint=False)

    text = "nothing fits: data 2 needs 12 GB more than 80 GB to decode"
    assert reason(fits) == f"{text}; batch_size=1 would fit (data 2)"
    assert tried == ["stages=offload", "batch_size=1"]
    assert reason(None) == text
    assert reason(lambda _: False).startswith(
        f"{text}; none of these would fit: stages=offload, batch_size=1, ranks=4,"
    )
    assert reason(lambda _: False).endswith("pipe.vae.enable_tiling() in Python lowers the memory of the decode")
