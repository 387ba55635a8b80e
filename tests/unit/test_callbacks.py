"""Settings of the callbacks: refused by name, with what is valid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cp.callbacks.sampling import EMACallback, SamplingCallback


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
        ({"value_range": (1.0, -1.0)}, r"value_range=\(1.0, -1.0\) must be \(black, white\) with black < white"),
    ],
)
def test_sampling_settings_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingCallback(lambda *_: torch.zeros(0), **{"every_n_train_steps": 1, **settings})


def test_evaluate_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="evaluate='yes' must be True or False"):
        EMACallback(evaluate="yes")  # type: ignore[arg-type]
