"""Settings of fine-tuning that do not fit the family, the data or each other are one error, without a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cp.errors import DataError, FamilyError
from lightning_cp.families import load_family
from lightning_cp.recipes.settings.finetune import check_mixture, check_prompts
from lightning_cp.recipes.settings.table import SettingsError
from lightning_cp.recipes.training.finetune import _check_dropout, _check_trained, _check_validation
from tests.unit.recipes.composed import composed


@pytest.mark.parametrize(
    ("family", "component", "lora", "message"),
    [
        ("flux_controlnet", "transformer", "null", "model.component=transformer must be controlnet for"),
        ("flux_controlnet", "controlnet", "{rank: 4}", "lora must be null for flux_controlnet, which trains"),
        ("wan_vace", "transformer", "{rank: 4}", "lora must be null for wan_vace, which trains weights of its transf"),
        ("pixart_sigma", "transformer", "{rank: 4}", "lora must be null for pixart_sigma: in diffusers, its"),
    ],
)
def test_what_a_family_does_not_train_is_named(family: str, component: str, lora: str, message: str) -> None:
    config = composed("train", "model=pretrained", f"model.component={component}", f"lora={lora}")
    with pytest.raises(FamilyError, match=message):
        _check_trained(config, load_family(family, {}))


@pytest.mark.parametrize("family", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_captions_that_belong_to_a_picture_are_not_dropped(family: str) -> None:
    with pytest.raises(FamilyError, match=rf"cond_dropout=0\.1 must be 0 for {family}"):
        _check_dropout(composed("train", "cond_dropout=0.1"), load_family(family, {"text_length": 8}))
    _check_dropout(composed("train", "cond_dropout=0"), load_family(family, {"text_length": 8}))


def test_held_out_files_leave_some_for_training() -> None:
    rows = [SimpleNamespace(source=f"{i}.png", use=use) for i, use in enumerate(("train", "train", "prior"))]
    config: Any = SimpleNamespace(data=SimpleNamespace(validation=2, path="media"))
    with pytest.raises(DataError, match=r"data.validation=2 must be less than 2, the number of files"):
        _check_validation(config, SimpleNamespace(rows=rows))  # type: ignore[arg-type]
    config.data.validation = 1
    _check_validation(config, SimpleNamespace(rows=rows))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("sampling.every=2", "sampling.every=2 and sampling.prompts=null belong together"),
        ("sampling.every=2 sampling.prompts=7", "sampling.prompts=7 is not valid"),
        ("sampling.every=2 sampling.prompts=[a,b] sampling.fps=0", "sampling.fps=0 is not valid"),
        ("sampling.every=2 sampling.prompts=[{seed:1}]", "sampling.prompts: entry 1 has prompt=None: must be"),
        ("sampling.every=2 sampling.prompts=[{prompt:a,image:no.png}]", "has image=no.png, which does not exist"),
        ("sampling=midpoint sampling.every=2", "needs sampling=prompts"),
    ],
)
def test_prompts_and_their_steps_belong_together(overrides: str, message: str) -> None:
    group = () if "midpoint" in overrides else ("sampling=prompts",)
    with pytest.raises(SettingsError, match=message):
        check_prompts(composed("train", *group, *overrides.split()))


@pytest.mark.parametrize(
    ("overrides", "data_parallel", "message"),
    [
        ("data.mixed=true batch_size=1 strategy=cp", 2, "must be at least 2"),
        ("strategy=cp ring=2 degrees.by_tokens={6:3}", 1, "degrees.by_tokens: 3 is no context degree within"),
        ("strategy=cp ring=2 degrees.by_tokens={6:1} shares=[2,1]", 1, "does not work with shares"),
        ("degrees.by_tokens={6:1}", 1, "degrees.by_tokens needs context parallelism"),
        ("strategy=cp ring=2 degrees.by_tokens=[1,2]", 1, "must be a dict from numbers of tokens"),
        ("strategy=cp batch_size=3", 2, "batch_size=3 is the global batch and must be a multiple of 2 groups"),
    ],
)
def test_mixtures_that_cannot_be_divided_are_named(
    overrides: str, data_parallel: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        check_mixture(composed("train", "data=latents", *overrides.split()), data_parallel=data_parallel)
