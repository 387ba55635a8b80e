"""docs/precompute.md: its code runs, its table is read, and its figures are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_cp.latent_cache import LatentCache
from lightning_cp.media import find_sources
from tests.families.cases import made
from tests.unit.finetune.precompute.made import clips, pictures, pipeline

_PAGE = (Path(__file__).parents[3] / "docs" / "precompute.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore")
def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    module, run = re.findall(r"```python\n(.*?)```", _PAGE, re.DOTALL)
    pipeline(tmp_path / "my-pipeline", "wan")
    clips(tmp_path / "clips", 4)
    scope: dict[str, Any] = {"torch": torch}
    exec(run, scope)
    assert scope["result"].encoded == 4
    exec(module, scope)
    transformer = type(made("wan").transformer).from_pretrained(tmp_path / "my-pipeline" / "transformer")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", max_steps=3, default_root_dir=tmp_path, **quiet)
    before = transformer.proj_out.weight.detach().clone()
    trainer.fit(scope["FineTuning"](transformer, "latents"))
    assert trainer.global_step == 3
    assert not torch.equal(before, transformer.proj_out.weight)
    latents = LatentCache("latents").sample(0)["latents"]
    assert latents.dtype == torch.float32


def test_the_table_of_the_page_is_read(tmp_path: Path) -> None:
    (table,) = re.findall(r"```text\n(.*?)```", _PAGE, re.DOTALL)
    (tmp_path / "rows.csv").write_text(table)
    clips(tmp_path / "clips", 1)
    for name in ("fox", "boats"):
        (tmp_path / "clips" / f"{name}.mp4").write_bytes((tmp_path / "clips" / "v0.mp4").read_bytes())
    (pictures(tmp_path / "p", 1) / "p0.png").rename(tmp_path / "photo.png")
    found = find_sources(tmp_path / "rows.csv")
    assert found.skipped == ()
    assert [(x.captions, x.repeats, x.end_s) for x in found.sources] == [
        (("a red fox in the snow",), 1, 5.0),
        (("two boats at sea",), 3, None),
        (("a tower, seen from below",), 1, None),
    ]


def test_the_figures_of_the_page() -> None:
    assert round(4 * 16 * 21 * 60 * 104 / 1e6, 1) == 8.4
    assert round(2 * 512 * 4096 / 1e6, 1) == 4.2
    assert round(12 * 81 * 480 * 832 * 4 / 1e9, 1) == 1.6
