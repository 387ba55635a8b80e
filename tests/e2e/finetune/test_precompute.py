"""recipes/precompute.py as a user runs it: by its own launcher and under torchrun."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_cp.finetune.families.latents import decode_latents
from lightning_cp.latent_cache import LatentCache
from tests.e2e.recipe import ROOT, Finished, error_of, started
from tests.families.cases import made
from tests.harness.cases import and_others
from tests.unit.finetune.precompute.made import PICTURES, clips, contents, encoded, pictures, pipeline

RECIPE = ROOT / "recipes" / "precompute.py"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
pytestmark = pytest.mark.filterwarnings("ignore")


def ran(*overrides: str, folder: Path, launcher: tuple[str, ...] = ()) -> Finished:
    with started(*overrides, folder=folder, launcher=launcher, script=RECIPE) as process:
        stdout, stderr = process.communicate(timeout=300)
        return Finished(process.returncode, stdout, stderr, folder)


def settings(pipe: Path, data: Path, output: Path, *more: str) -> list[str]:
    return [f"model.pretrained={pipe}", f"data.path={data}", f"output={output}", "precompute.dtype=float32", *more]


@pytest.mark.full
def test_clips_on_two_ranks_of_its_own(tmp_path: Path) -> None:
    data, pipe = clips(tmp_path / "data"), pipeline(tmp_path / "pipe", "wan")
    (data / "bad.mp4").write_bytes(b"no video")
    (data / "bad.txt").write_text("a text")
    given = settings(pipe, data, tmp_path / "out", "precompute.sizes=[[32,48]]", "precompute.frames=5", "devices=2")
    done = ran(*given, "progress=true", folder=tmp_path / "run")
    assert done.exit_code == 0, done.stderr
    table = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in done.stdout.splitlines() if "│" in line}
    numbers = {"found": "4", "encoded by this run": "3", "stored before": "0", "skipped": "1", "5 × 32 × 48": "3"}
    numbers |= {"changed since they were stored": "0", "no longer in the data": "0"}
    assert table == numbers | {"captions encoded by this run": "3"}
    assert "3 samples, 3 captions" in done.stdout
    assert "bad.mp4: cannot be decoded" in done.stdout
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert row["file"] == str(data / "bad.mp4")
    assert "samples/s" in done.stderr
    assert "100%" in done.stderr
    assert len(done.stderr) < 1500, done.stderr  # no flood without a terminal
    cache, vae = LatentCache(tmp_path / "out"), made("wan").vae
    with Image.open(tmp_path / "out" / "contact_sheet.png") as sheet:
        shown = np.asarray(sheet.convert("RGB"), dtype=float) / 255
    for i in range(3):  # thumbnails of 192 pixels, with a border
        middle = decode_latents(vae, cache.sample(i)["latents"][None])[0, :, 2]
        left = i % 2 * 194 + 2
        top = i // 2 * 194 + 2
        part = shown[top : top + 128, left : left + 192].mean(axis=(0, 1))
        assert np.abs(part - middle.mean(dim=(1, 2)).numpy()).max() < 0.03
    again = ran(*given, "progress=false", folder=tmp_path / "again")
    assert re.search(r"encoded by this run +│ +0 │", again.stdout)
    assert again.stderr == ""


@pytest.mark.full
def test_pictures_under_torchrun_and_refusals_of_what_changed(tmp_path: Path) -> None:
    data, pipe = pictures(tmp_path / "data", 5), pipeline(tmp_path / "pipe")
    given = settings(pipe, data, tmp_path / "out", "precompute.sizes=[[16,24],[24,16]]")
    done = ran(*given, folder=tmp_path / "run", launcher=TORCHRUN)
    assert done.exit_code == 0, done.stderr
    assert "5 samples, 6 captions" in done.stdout
    first = contents(tmp_path / "out")
    own = settings(pipe, data, tmp_path / "own", "precompute.sizes=[[24,16],[16,24]]", "devices=3", "num_workers=0")
    assert ran(*own, folder=tmp_path / "run2").exit_code == 0
    assert contents(tmp_path / "own") == first
    (data / "p1.txt").write_text("new")
    assert ran(*own, folder=tmp_path / "run3").exit_code == 0  # a caption may change
    assert contents(tmp_path / "own") != first
    pictures(data, 5)
    assert "max_upscale" in error_of(ran(*own, "precompute.max_upscale=2", folder=tmp_path / "run5"))


@pytest.mark.full
def test_two_runs_write_one_cache_together(tmp_path: Path) -> None:
    data, pipe = pictures(tmp_path / "data", 100), pipeline(tmp_path / "pipe")
    given = settings(pipe, data, tmp_path / "out", "precompute.sizes=[[16,24],[24,16]]")
    with (
        started(*given, folder=tmp_path / "run", script=RECIPE) as first,
        started(*given, folder=tmp_path / "run2", script=RECIPE) as second,
    ):
        errors = [run.communicate(timeout=300)[1] for run in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), errors
    assert len(LatentCache(tmp_path / "out")) == 100
    encoded(pipe, data, tmp_path / "alone", PICTURES)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


_REFUSED = [
    ("data.path=gone", "data.path={tmp}/gone does not exist"),
    ("data.path={pipe}/model_index.json", "must be a folder of media, or a .csv or .jsonl table"),
    ("model.pretrained={tmp}/gone", "must be a pipeline's folder, or the id of one on the Hub"),
    ("output={data}/latents", "must not lie in data.path"),
    ("output={pipe}", "holds other files"),
    ("output={pipe}/model_index.json/out", "cannot be written to"),
    ("precompute.sizes=[[480]]", "precompute.sizes=[[480]] is not valid"),
    ("precompute.clips=all", "precompute.clips=all needs the length of a clip"),
    ("precompute.vae_ranks=2 devices=3", "precompute.vae_ranks=2 must divide devices=3"),
    ("precompute.workers=3", "workers"),
]


@pytest.mark.parametrize("refused", and_others(_REFUSED))
@pytest.mark.default(1)
def test_bad_settings_are_one_line_before_anything_slow(refused: list[tuple[str, str]], tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.errors import ConfigCompositionException

    from lightning_cp.launch.machine import Machine
    from lightning_cp.recipes.runs.precompute import check_precompute
    from lightning_cp.recipes.settings.table import SettingsError

    data, pipe = pictures(tmp_path / "data", 1), tmp_path / "pipe"
    pipe.mkdir()
    (pipe / "model_index.json").write_text("{}")
    names = {"tmp": tmp_path, "data": data, "pipe": pipe}
    given = [f"model.pretrained={pipe}", f"data.path={data}", f"output={tmp_path}/out", "run_dir=x"]
    for change, message in refused:
        changes = change.format(**names).replace("=gone", f"={tmp_path}/gone").split()
        with (
            initialize_config_dir(str(ROOT / "conf" / "precompute"), version_base="1.3"),
            pytest.raises((SettingsError, ConfigCompositionException)) as raised,
        ):
            check_precompute(compose("precompute", [*given, *changes]), Machine(cores=4), None)
        assert message.format(**names) in str(raised.value)
        assert "\n" not in str(raised.value) or "precompute.workers" in change


@pytest.mark.full
def test_a_refused_setting_exits_with_2_and_help_lists_every_setting(tmp_path: Path) -> None:
    done = ran("data.path=x", folder=tmp_path / "run")
    assert (done.exit_code, error_of(done)) == (
        2,
        "error: model.pretrained must be given, for example model.pretrained=my-pipeline",
    )
    shown = ran("--help", folder=tmp_path / "run").stdout
    listed = {word for line in shown.splitlines() if line.startswith("  ") for word in line.replace(",", " ").split()}
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "precompute" / "precompute.yaml"), resolve=False)
    assert isinstance(config, dict)
    keys = []
    for key, value in config.items():
        if key not in ("defaults", "hydra"):
            keys += [f"{key}.{name}" for name in value] if isinstance(value, dict) else [key]
    assert set(keys) <= listed
