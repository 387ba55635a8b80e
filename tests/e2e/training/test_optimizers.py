"""Optimizers of `optim=` train on several ranks as on one process, and their states are saved and resumed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from lightning_cp.checkpoint.store import flatten_state, load_checkpoint
from tests.e2e.recipe import SMALL, Finished, run

COMMON = (*SMALL, "warmup_steps=1", "max_steps=4", "checkpoint_every=2", "progress=false", "accelerator=cpu")
OPTIONS = {"adamw_8bit": ("optim.min_8bit_size=256",)}
OTHERS = ("adamw_8bit", "adafactor", "lion", "prodigy")


def train(folder: Path, optim: str, *given: str) -> Finished:
    finished = run(*COMMON, f"optim={optim}", *OPTIONS.get(optim, ()), *given, folder=folder)
    assert finished.exit_code == 0, finished.stdout + finished.stderr
    return finished


def optimizer_state(finished: Finished) -> dict[str, torch.Tensor]:
    saved = load_checkpoint(finished.folder / "checkpoints/step_00000004")
    return flatten_state(saved.states["optimizer"])[0]


@pytest.mark.full  # by default with optim=adamw: test_train.py
@pytest.mark.parametrize("optim", ["adamw_fused", *OTHERS])
def test_a_resumed_run_and_ranks_train_as_one_process(optim: str, tmp_path: Path) -> None:
    if optim == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not in the extra dev: its import starts threads, before tests fork")
    whole = train(tmp_path / "whole", optim)
    resumed = train(tmp_path / "resumed", optim, f"resume={whole.folder / 'checkpoints/step_00000002'}")
    assert [row.step for row in resumed.rows] == [1, 2, 3, 4]
    assert resumed.losses == whole.losses
    mine, expected = optimizer_state(resumed), optimizer_state(whole)
    assert mine.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in mine.items())
    has_bytes = any(x.dtype == torch.uint8 and x.numel() >= 256 for x in expected.values())
    assert has_bytes == (optim == "adamw_8bit")
    is_refused = optim in ("adamw_8bit", "adafactor", "prodigy")  # see tests/unit/recipes/test_settings.py
    ranks = train(tmp_path / "ranks", optim, "strategy=cp" if is_refused else "strategy=cp_fsdp", "ring=3")
    # a last bit of a gradient can change an 8-bit state by one of its 256 values, and the sign that Lion follows
    rounding = {"adamw_8bit": 1e-3, "lion": 1e-3}
    assert ranks.losses == pytest.approx(whole.losses, rel=rounding.get(optim, 1e-6))
    adamw = train(tmp_path / "adamw", "adamw")
    assert optim == "adamw_fused" or adamw.losses[1:] != whole.losses[1:]
    if optim in ("adamw_fused", "adamw_8bit"):
        assert adamw.losses == pytest.approx(whole.losses, rel=1e-6 if optim == "adamw_fused" else 1e-2)


@pytest.mark.full
def test_prodigy_keeps_its_estimate_at_another_topology(tmp_path: Path) -> None:
    given = ("+optim.d0=1e-5", "optim.d_coef=20", "max_steps=6")  # the estimate grows
    whole = train(tmp_path / "whole", "prodigy", *given)
    started = train(tmp_path / "started", "prodigy", *given, "max_steps=4", "strategy=cp", "data_parallel=2")
    last = f"resume={started.folder / 'checkpoints/step_00000004'}"
    resumed = train(tmp_path / "resumed", "prodigy", *given, last, "strategy=cp", "ring=3", "trainer=lightning")
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-5)
    groups = [_groups(run.folder / "checkpoints/step_00000006") for run in (whole, resumed)]
    assert groups[0]["k"] == groups[1]["k"] == 6
    assert groups[0]["d"] > 2e-5
    for name in ("d", "d_max", "d_numerator"):
        assert groups[1][name] == pytest.approx(groups[0][name], rel=1e-4)
    other = train(tmp_path / "other", "prodigy", *given, last, "optim.d_coef=0.5")  # settings are those of the run
    assert _groups(other.folder / "checkpoints/step_00000006")["d_coef"] == 0.5


def _groups(checkpoint: Path) -> dict[str, float]:
    """Return the values of the optimizer's parameter group in a checkpoint."""
    facts = load_checkpoint(checkpoint).states["optimizer"]["param_groups"]
    values: dict[str, float] = facts[0]
    return values
