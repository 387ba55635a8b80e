"""Models that are trained from scratch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch import nn

from lightning_cp.recipes.training.from_scratch import FromScratch


def my_model() -> nn.Module:
    """A model with a transformer that is none of diffusers."""
    model = nn.Module()
    model.transformer = nn.Linear(2, 2)
    return model


@pytest.mark.parametrize("export", [True, False])
def test_a_transformer_that_cannot_be_exported_is_refused_before_training(export: bool) -> None:
    config = OmegaConf.create({"model": {"_target_": f"{__name__}.my_model"}, "export": export})
    setup: Any = SimpleNamespace(config=config, checkpointed=lambda module: None)
    if export:
        with pytest.raises(ValueError, match="this model has a Linear: use export=false"):
            FromScratch.denoiser(setup)
    else:
        assert isinstance(FromScratch.denoiser(setup), nn.Module)
