"""docs/families.md: its code runs, and the family that it adds passes the proofs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_cp.families import collate, family_for
from lightning_cp.finetune.families import registry
from lightning_cp.objectives import objective_for
from tests.families.cases import CASES, made, media
from tests.pipelines import PIPES

_PAGE = Path(__file__).parents[3] / "docs" / "families.md"
_CODE = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.filterwarnings("ignore")
def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, batch, _, family, proofs = _CODE
    monkeypatch.setattr(registry, "_REGISTERED", {})
    pipe = PIPES["auraflow"].pipe()
    pixels = torch.randint(256, (2, 3, 1, 16, 24)).float() / 255 * 2 - 1
    scope: dict[str, Any] = {"LightningModule": LightningModule, "pipe": pipe, "pixels": pixels}
    exec(family, scope)
    exec(proofs, scope)
    assert {proof.name for proof in scope["report"].proofs} == {"capture", "oracle", "batch"}
    assert scope["report"].passed, scope["report"]
    exec(module, scope)
    fine_tuning = scope["FineTuning"](pipe)
    scope["family"] = fine_tuning.family
    exec(batch, scope)
    fine_tuning.configure_optimizers = lambda: torch.optim.SGD(fine_tuning.parameters(), lr=1e-3)
    loader = DataLoader(scope["samples"], batch_size=2, collate_fn=lambda _: scope["batch"])
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(fine_tuning, loader)
    assert trainer.global_step == 2


def test_the_family_of_the_page_is_short() -> None:
    assert len(_CODE[2].splitlines()) <= 60


@pytest.mark.filterwarnings("ignore")
def test_the_code_for_a_side_model_runs() -> None:
    case, pipe = CASES["flux_controlnet"], made("flux_controlnet")
    family = family_for(pipe)
    texts = family.encode_text(pipe, case.captions[:1])
    batch = collate([{**texts[0], **family.encode_media(pipe, media("flux_controlnet"))[0]}], family.text)
    scope: dict[str, Any] = {"pipe": pipe, "batch": batch, "family_for": family_for, "objective_for": objective_for}
    exec(_CODE[2], scope)
    scope["loss"].backward()
    trained = {name.split(".")[0] for name, x in scope["model"].named_parameters() if x.grad is not None}
    assert trained == {"controlnet"}
