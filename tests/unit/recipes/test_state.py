import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.checkpoint import CheckpointError, find_checkpoint
from lightning_cp.checkpoint.manifest import FileEntry
from lightning_cp.checkpoint.store import save_checkpoint
from lightning_cp.data import GlobalBatchSampler
from lightning_cp.recipes.training.state import TrainState
from lightning_cp.training import WeightAverage


def make_state(width: int = 4, seed: int = 0, batch_size: int = 4) -> TrainState:
    module = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    sampler = GlobalBatchSampler(16, batch_size, seed=seed)
    return TrainState(module, module, optimizer, WeightAverage(module, 0.9), sampler, seed)


def advance(state: TrainState, steps: int) -> None:
    data = torch.linspace(-1, 1, 48).view(16, 3)
    for _ in range(steps):
        state.sampler.seek(state.step)
        loss = state.model(data[next(iter(state.sampler))]).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        state.average.update(state.module, step=state.step)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    straight = make_state()
    first = make_state()
    first.module.load_state_dict(straight.module.state_dict())
    first.average = WeightAverage(first.module, 0.9)
    advance(straight, 11)
    advance(first, 5)
    resumed = make_state()
    resumed.load(save_checkpoint(tmp_path, first.snapshot()))
    assert resumed.step == 5
    advance(resumed, 6)
    for a, b in zip(straight.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, average in straight.average.state_dict().items():
        assert torch.equal(average, resumed.average.state_dict()[name])


def test_settings_of_the_optimizer_are_those_of_the_run_that_goes_on(tmp_path: Path) -> None:
    first, resumed = make_state(), make_state()
    advance(first, 2)
    resumed.optimizer.param_groups[0].update(weight_decay=0.5, betas=(0.5, 0.6))
    resumed.load(save_checkpoint(tmp_path, first.snapshot()))
    (group,) = resumed.optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["lr"]) == (0.5, (0.5, 0.6), 0.05)
    assert len(resumed.optimizer.state) == 4


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    state = make_state()
    folder = save_checkpoint(tmp_path, state.snapshot())
    with pytest.raises(ValueError, match=r"0.bias is \(5,\) in this run and \(4,\) in the checkpoint"):
        make_state(width=5).load(folder)
    with pytest.raises(ValueError, match="seed=1 differs"):
        make_state(seed=1).load(folder)
    with pytest.raises(ValueError, match="batch_size=8 differs"):
        make_state(batch_size=8).load(folder)


class OneUnused(nn.Sequential):
    """Its last weight never gets a gradient."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Linear(4, 1))
        self.unused = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD])
def test_a_checkpoint_before_the_first_update_changes_nothing(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    saving, straight, resumed = make_state(), make_state(), make_state()
    settings: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5} if kind is torch.optim.SGD else {}
    for state in (saving, straight, resumed):
        state.module.load_state_dict(saving.module.state_dict())
        state.average = WeightAverage(state.module, 0.9)
        state.optimizer = kind(state.module.parameters(), lr=0.05, weight_decay=0.1, **settings)
    resumed.load(save_checkpoint(tmp_path, saving.snapshot()))
    assert not saving.optimizer.state
    assert not resumed.optimizer.state
    for state in (saving, straight, resumed):
        advance(state, 3)
    for a, b, c in zip(*(state.module.parameters() for state in (saving, straight, resumed)), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(c, b)


def make_unused() -> TrainState:
    module = OneUnused()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    return TrainState(module, module, optimizer, WeightAverage(module, 0.9), GlobalBatchSampler(16, 4), 0)


def test_weights_without_a_gradient_are_resumed_too(tmp_path: Path) -> None:
    first, resumed = make_unused(), make_unused()
    advance(first, 2)
    resumed.load(save_checkpoint(tmp_path, first.snapshot()))
    steps = [int(resumed.optimizer.state[p]["step"]) for name, p in resumed.module.named_parameters() if "." in name]
    assert steps == [2, 2, 2, 2]
    advance(first, 2)
    advance(resumed, 2)
    for a, b in zip(first.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(a, b)


def _without(state: dict[str, Any]) -> None:
    del state["0.weight"]


def _exchanged(state: dict[str, Any]) -> None:
    state["0.weight"], state["1.weight"] = state["1.weight"], state["0.weight"]


def _without_a_part(state: dict[str, Any]) -> None:
    del state["0.weight"]["exp_avg"]


@pytest.mark.parametrize("damage", [_without, _exchanged, _without_a_part])
def test_a_wrong_optimizer_state_is_refused(damage: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    first = make_state()
    advance(first, 2)
    saved = first.snapshot()
    damage(saved.states["optimizer"]["state"])
    folder = save_checkpoint(tmp_path, saved)
    with pytest.raises(
        CheckpointError, match=r"the shape of optimizer\.state\.0\.weight\.exp_avg is \(4, 3\) in this run"
    ):
        make_state().load(folder)


def test_a_checkpoint_on_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    state = make_state()
    state.base = "transformer a"
    folder = save_checkpoint(tmp_path, state.snapshot())
    state.load(folder)
    state.base = "transformer b"
    with pytest.raises(CheckpointError, match=r"other frozen weights than those of model\.pretrained"):
        state.load(folder)


def test_a_checkpoint_holds_no_pickle(tmp_path: Path) -> None:
    state = make_state()
    advance(state, 1)
    for path in save_checkpoint(tmp_path, state.snapshot()).iterdir():
        assert path.suffix in (".safetensors", ".json")
        with pytest.raises((pickle.UnpicklingError, ValueError, KeyError, IndexError, EOFError, UnicodeDecodeError)):
            pickle.loads(path.read_bytes())


def test_the_average_warms_up_swaps_in_and_out() -> None:
    module = nn.Linear(2, 1)
    average = WeightAverage(module, 0.5)
    before = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        module.weight.add_(1)
    average.update(module, step=1)  # keeps 2/11 of the past
    expected = before["weight"] * (2 / 11) + module.weight * (9 / 11)
    own = module.weight.detach().clone()
    with average.swapped_in(module):
        assert torch.allclose(module.weight, expected)
    assert torch.equal(module.weight, own)
    average.update(module, step=1000)
    assert torch.allclose(average.state_dict()["weight"], 0.5 * (expected + own))
    with pytest.raises(ValueError, match=r"decay=1\.0"):
        WeightAverage(module, 1.0)
    with pytest.raises(KeyError, match="bias"):
        average.load_state_dict({"weight": own})


def test_the_average_of_low_precision_weights_is_kept_in_float32() -> None:
    module = nn.Linear(2, 1, dtype=torch.bfloat16)
    average = WeightAverage(module)
    average.update(module, step=1)
    assert average.state_dict()["weight"].dtype == torch.float32
    with average.swapped_in(module):
        assert module.weight.dtype == torch.bfloat16


def test_bytes_of_a_resumed_checkpoint_are_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    save_checkpoint(checkpoints, make_state().snapshot())
    verified: list[str] = []
    of = FileEntry.of
    monkeypatch.setattr(FileEntry, "of", lambda path: verified.append(path.name) or of(path))
    make_state().load(find_checkpoint("last", tmp_path), verify=False)
    assert verified
    assert len(set(verified)) == len(verified)
