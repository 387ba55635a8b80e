"""docs/precompute.md: its code runs, its table is read, and its figures are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer

from lightning_cp.latent_cache import LatentCache
from lightning_cp.media import DataFolder, find_in_folders, find_sources
from lightning_cp.recipes.runs.precompute import check_precompute
from lightning_cp.recipes.settings.data_folders import data_folders
from tests.e2e.recipe import ROOT
from tests.families.cases import made
from tests.unit.finetune.precompute.made import clips, pictures, pipeline
from tests.unit.recipes.test_finetune_settings import NoGpu

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


def test_the_folders_of_the_page_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (mix,) = re.findall(r"```yaml\n(.*?)```", _PAGE, re.DOTALL)
    (line,) = re.findall(r"^`'(data\.path=.*)'`\.$", _PAGE, re.MULTILINE)
    (tmp_path / "conf" / "mix").mkdir(parents=True)
    (tmp_path / "conf" / "mix" / "portraits.yaml").write_text(mix)
    (tmp_path / "my-pipeline").mkdir()
    for name in ("photos", "portraits", "men", "test_photos"):
        pictures(tmp_path / name, 1)
    found = []
    for override in ("+mix=portraits", line, "data.path={path: men, caption: 'a man, {}'}", "data.path=photos"):
        with initialize_config_dir(str(ROOT / "conf" / "precompute"), version_base="1.3"):
            given = [override, "model.pretrained=my-pipeline", "run_dir=run", "hydra.searchpath=[file://conf]"]
            config = compose("precompute", overrides=given, return_hydra_config=False)
        checked = check_precompute(config, NoGpu(cores=2), None).config
        found.append(find_in_folders([DataFolder(**folder) for folder in data_folders(checked)]).sources)
    ours = [(x.id, x.captions[0], x.repeats, x.weight, x.use, x.sizes) for x in found[0]]
    assert ours == [
        ("p0.png", "ohwx, picture 0", 10, 1.0, "train", None),
        ("portraits/p0.png", "picture 0", 1, 1.0, "train", ((1024, 768),)),
        ("men/p0.png", "a photo of a man", 1, 0.5, "prior", None),
        ("test_photos/p0.png", "picture 0", 1, 1.0, "validation", None),
    ]
    assert [x.id for x in found[1]] == ["p0.png", "test_photos/p0.png"]
    assert found[1][0] == found[0][0]
    assert [(x.id, x.captions[0]) for some in found[2:] for x in some] == [
        ("p0.png", "a man, picture 0"),
        ("p0.png", "picture 0"),
    ]


def test_the_figures_of_the_page() -> None:
    assert round(4 * 16 * 21 * 60 * 104 / 1e6, 1) == 8.4
    assert round(2 * 512 * 4096 / 1e6, 1) == 4.2
    assert round(12 * 81 * 480 * 832 * 4 / 1e9, 1) == 1.6
