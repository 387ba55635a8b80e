"""Settings of the callbacks: refused by name, with what is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_cp.callbacks.sampling import EMACallback, SamplingCallback
from tests.dist.lightning_ranks import QUIET


@pytest.mark.parametrize("decay", [1, 1.5, -0.1, float("nan"), True, "0.9", None])
def test_an_ema_decay_outside_of_zero_to_one_is_refused(decay: Any) -> None:
    with pytest.raises(ValueError, match=r"^decay=.* must be a number from 0 to below 1"):
        EMACallback(decay)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ema_decay": 1.0}, r"ema_decay=1.0 must be a number from 0 to below 1, for instance 0.999"),
        ({"every_n_train_steps": 0}, r"every_n_train_steps=0 must be an integer of at least 1"),
        ({"every_n_train_steps": 2.5}, r"every_n_train_steps=2.5 must be an integer of at least 1"),
        ({"name": "../wide"}, r"name='../wide' must name a folder"),
        ({"value_range": (1.0, -1.0)}, r"value_range=\(1.0, -1.0\) must be \(black, white\) with black < white"),
    ],
)
def test_sampling_settings_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingCallback(lambda *_: torch.zeros(0), **{"every_n_train_steps": 1, **settings})


def test_evaluate_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="evaluate='yes' must be True or False"):
        EMACallback(evaluate="yes")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_two_sampling_callbacks_have_folders_and_averages_of_their_own(tmp_path: Path) -> None:
    def sampling(**settings: Any) -> SamplingCallback:
        return SamplingCallback(lambda *_: torch.zeros(1, 1, 4, 4), every_n_train_steps=2, **settings)

    checkpoint = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=2)
    pictures = [sampling(ema_decay=0.9), sampling(name="wide", ema_decay=0.1)]
    settings: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = Trainer(accelerator="cpu", max_steps=2, callbacks=[checkpoint, *pictures], **settings)
    trainer.fit(BoringModel())
    for name in ("samples", "wide"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["step_00000002.png"]
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    assert {"SamplingCallback", "SamplingCallback[wide]"} <= saved.keys()  # the first is that of older checkpoints
    for one in pictures:  # the averages after the last step, although ModelCheckpoint is first in the list
        average = saved[one.state_key]
        assert average
        for key, x in one.state_dict().items():
            assert torch.equal(average[key], x)
    assert not torch.equal(saved["SamplingCallback"]["layer.weight"], saved["SamplingCallback[wide]"]["layer.weight"])
