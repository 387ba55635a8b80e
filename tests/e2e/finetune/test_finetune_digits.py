"""The commands and scripts for a model without a pipeline run unchanged, with few steps and a small base."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.docs.test_docs_pages import commands, run
from tests.e2e.recipe import ROOT

PAGE = (ROOT / "docs/finetuning.md").read_text()
PART = PAGE.partition("## A model without a pipeline\n")[2].partition("\n## ")[0]
TRAIN, BEFORE, AFTER = commands(PART)
LORA, LOOK = (shlex.split(line, comments=True) for line in re.findall(r"^python (.*)$", PART, re.MULTILINE))
COMMANDS = [TRAIN, LORA, BEFORE, AFTER, LOOK]
SMALL = {
    "recipes/train.py": ("max_steps=3", "model.transformer.num_layers=1", "sampling.num_samples=10"),
    "recipes/sample.py": ("num_samples=20", "num_inference_steps=2"),
}


@pytest.mark.full
def test_the_page_runs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs/finetune_digits", tmp_path, dirs_exist_ok=True)
    losses: dict[str, list[str]] = {}
    for script, *given in COMMANDS:
        if script in SMALL:
            run(tmp_path, str(ROOT / script), *given, *SMALL[script], "progress=false", "accelerator=cpu")
        elif script == "digits_lora.py":
            for ring in ("3", "2", "1"):
                losses[ring] = re.findall(r"loss (\S+)", run(tmp_path, script, given[0], ring, "12"))
        else:
            printed = run(tmp_path, script, *given)
            assert re.findall(r"(\w+): \d+% of the pixels are light; recognised \d+%, exchanged", printed) == given
    assert all(len(found) == 12 for found in losses.values())
    one = [float(x) for x in losses.pop("1")]
    for found in losses.values():
        assert [float(x) for x in found] == pytest.approx(one, rel=1e-4)
    before, after = (Image.open(tmp_path / name / "contact_sheet.png") for name in ("before", "after"))
    assert before.size == after.size
    assert before.tobytes() != after.tobytes()
    wider = ("experiment=pretrain_digits", "run_dir=wider", "model.transformer.num_attention_heads=8")
    run(tmp_path, str(ROOT / "recipes/train.py"), *wider, *SMALL["recipes/train.py"], "progress=false")
    with pytest.raises(AssertionError, match=r"lora=.* is of another model"):
        run(
            tmp_path,
            str(ROOT / "recipes/sample.py"),
            "source=wider",
            "lora=digits-lora",
            "num_samples=10",
            "progress=false",
        )
