"""The settings of fine-tuning: each rule refuses what breaks it, with its name and value."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lightning_cp.finetune import LoraSettings
from lightning_cp.finetune.settings import DataFolder
from lightning_cp.objectives import Diffusion, FlowMatching
from lightning_cp.precompute import PrecomputeSettings
from lightning_cp.rules import rules_of
from tests.unit.recipes.test_rules import wrong

NEEDED: dict[Any, dict[str, Any]] = {Diffusion: {"seed": 0}, FlowMatching: {"seed": 0}, DataFolder: {"path": "clips"}}


@pytest.mark.parametrize("kind", [DataFolder, Diffusion, FlowMatching, LoraSettings, PrecomputeSettings])
def test_what_breaks_a_rule_is_one_error_with_name_and_value(kind: Any) -> None:
    assert len(rules_of(kind)) > 5
    for name, rule in rules_of(kind).items():
        values = [x for x in wrong(rule) if (kind, name) != (DataFolder, "path") or x == ""]
        assert values, name
        for value in values:
            with pytest.raises(ValueError, match=rf"\b{name}=.*{re.escape(str(value))}.* must be"):
                kind(**{**NEEDED.get(kind, {}), name: value})


def test_the_identity_of_precompute_settings_does_not_depend_on_how_they_are_written() -> None:
    """What a cache was made with is compared by it: caches of earlier versions have these values."""
    first = PrecomputeSettings(sizes=[[32, 48], [16, 24]], frames=5, dtype=torch.float32)
    second = PrecomputeSettings(sizes=((16, 24), (32, 48)), frames=[5, 5], dtype="float32")
    assert first.identity() == second.identity()
    assert first.identity()["dtype"] == "torch.float32"
    assert first.plain()["sizes"] == [[32, 48], [16, 24]]
    with pytest.raises(ValueError, match="clips=all needs the length of a clip"):
        PrecomputeSettings(clips="all")
