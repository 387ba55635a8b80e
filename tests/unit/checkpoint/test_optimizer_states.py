"""States of optimizers, by numbers and by names, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import AdamW

from lightning_cp.checkpoint import CheckpointError
from lightning_cp.checkpoint.safe_load import load_optimizer_state

_OPTIONS = StateDictOptions(full_state_dict=True, strict=True)


def _trained(sizes: tuple[int, ...]) -> tuple[nn.Sequential, AdamW]:
    module = nn.Sequential(*(nn.Linear(4, size, bias=False) for size in sizes))
    optimizer = AdamW(module[::-1].parameters())
    for layer in module:
        layer(torch.ones(4)).sum().backward()
    return module, optimizer


def test_a_state_of_another_shape_is_refused_before_anything_is_loaded() -> None:
    _, saved = _trained((3, 2))
    saved.step()
    module, optimizer = _trained((2, 3))
    optimizer.zero_grad()
    with pytest.raises(CheckpointError, match=r"exp_avg of 1.weight has shape \(2, 4\), .* here has \(3, 4\)"):
        load_optimizer_state(module, optimizer, optim_state_dict=saved.state_dict(), options=_OPTIONS)


def test_numbers_are_positions_in_the_parameter_groups() -> None:
    module, saved = _trained((3, 3))
    saved.state[module[0].weight] = {"step": torch.tensor(5.0), "exp_avg": torch.ones(3, 4)}
    module, optimizer = _trained((3, 3))
    optimizer.zero_grad()
    load_optimizer_state(module, optimizer, optim_state_dict=saved.state_dict(), options=_OPTIONS)
    assert optimizer.state[module[0].weight]["step"] == 5
    assert module[1].weight not in optimizer.state


def test_a_state_of_a_parameter_in_no_group_is_damaged() -> None:
    module, optimizer = _trained((3, 3))
    damaged = {**optimizer.state_dict(), "state": {7: {}}}
    with pytest.raises(CheckpointError, match="a saved optimizer state is damaged: KeyError: 7"):
        load_optimizer_state(module, optimizer, optim_state_dict=damaged, options=_OPTIONS)
