"""recipes/plan.py: its table, its files, settings for the other recipes, and its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_cp.planning.search import search
from lightning_cp.recipes.plan import run_calibration
from lightning_cp.recipes.planning.settings import request_of
from lightning_cp.recipes.runs.command import conf_dir
from tests.harness import warm
from tests.harness.cases import and_others
from tests.pipelines import PIPES

_ROOT = Path(__file__).parents[3]
_SMALL = ("model=wan_tiny", "gpu=cpu", "memory_gb=4", "hydra.run.dir=run")
_OWN = """
import torch
from lightning_cp.plans import Plan, split

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * float(x.sum()) if READS else x

READS = False
model = Mine
def inputs():
    return {"x": torch.empty(1, 12, 16, device="meta")}
plan = Plan(blocks={"blocks": {"x": split(1, "image")}}, gather={"blocks.1": split(1, "image")})
"""


def _plan(folder: Path, *settings: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_ROOT / "recipes" / "plan.py"), *settings]
    return warm.run(command, cwd=folder, timeout=timeout)


def _read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "plan.json").read_text(encoding="utf-8"))
    return found


def test_a_plan_has_a_table_a_choice_a_reason_and_files(tmp_path: Path) -> None:
    done = _plan(tmp_path, *_SMALL, "ranks=2", "fixed.sharded=false")
    assert done.returncode == 0, done.stderr
    for printed in ("wan_tiny, train, 2 × CPU core", "→", "data 2", "times are not calibrated", "bound by the host"):
        assert printed in done.stdout
    found = _read(tmp_path)
    assert found["overrides"][0] == "strategy=cp"
    assert " ".join(found["overrides"]) in done.stdout
    assert {x["layout"]["ring"] for x in found["choices"]} == {1, 2}
    assert all(x["peak_bytes"]["optimizer"] > 0 and x["step_s"] > 0 for x in found["choices"])
    assert found["tokens"] == 72


@pytest.mark.full
def test_folders_files_and_own_devices_are_planned_for(tmp_path: Path) -> None:
    (tmp_path / "pipe" / "transformer").mkdir(parents=True)
    config = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 64, "text_dim": 16}
    file = tmp_path / "pipe" / "transformer" / "config.json"
    file.write_text(json.dumps({"_class_name": "WanTransformer3DModel", **config}))
    figures = "{name: mine, tflops: 1, memory_gb: 9, memory_gbs: 9, link_gbs: 1, network_gbs: 1}"
    sizes = ("height=64", "width=64", "frames=5", "ranks=2", "hydra.run.dir=run")
    done = _plan(tmp_path, "model=pipe", f"gpu={figures}", *sizes, "task=sample", "guidance=true")
    assert done.returncode == 0, done.stderr
    assert _read(tmp_path)["device"]["name"] == "mine"
    assert "cfg=2" in _read(tmp_path)["overrides"]
    (tmp_path / "mine.py").write_text(_OWN)
    done = _plan(tmp_path, "model=mine.py", "plan=mine.py", "ranks=2", "gpu=h100", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    assert _read(tmp_path)["model"] == "mine"
    (tmp_path / "mine.py").write_text(_OWN.replace("READS = False", "READS = True"))
    done = _plan(tmp_path, "model=mine.py", "plan=mine.py", "ranks=2", "gpu=h100", "hydra.run.dir=run")
    assert done.returncode == 2
    assert "reads values of a tensor" in done.stderr


@pytest.mark.full
def test_the_weights_of_a_pipelines_encoders_and_vae_are_counted(tmp_path: Path) -> None:
    pipe = PIPES["wan"].make()
    pipe.save_pretrained(tmp_path / "pipe")
    sizes = ("height=64", "width=64", "frames=5", "text=9", "ranks=2", "gpu=cpu", "task=sample", "hydra.run.dir=run")
    done = _plan(tmp_path, "model=pipe", *sizes)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"planned: a step of the transformer, with the weights of text_encoder .* GB, vae .* GB", done.stdout
    )
    assert "not planned: PipeFusion; encoding; decoding" in done.stdout
    weights = {x: 4 * sum(y.numel() for y in getattr(pipe, x).parameters()) / 1e9 for x in ("text_encoder", "vae")}
    assert _read(tmp_path)["others_gb"] == pytest.approx(weights)
    done = _plan(tmp_path, "model=pipe", *sizes, "components=false")
    assert "planned: a step of the transformer alone" in done.stdout


@pytest.mark.full
def test_if_nothing_fits_the_missing_memory_is_printed(tmp_path: Path) -> None:
    done = _plan(tmp_path, *_SMALL, "ranks=1", "memory_gb=0.0001", "reserved_gb=0")
    assert done.returncode == 1
    assert done.stderr.startswith("error: nothing fits: one rank")
    assert "GB more than 0.0001 GB" in done.stderr
    assert _read(tmp_path)["choices"] == []


def test_invalid_settings_are_refused_in_one_line(tmp_path: Path) -> None:
    done = _plan(tmp_path, *_SMALL, "gpu=mi300")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "gpu=mi300 is not in the table of devices" in done.stderr
    assert done.stdout == ""


_REFUSED = [
    ("ranks=0", "ranks=0 must be"),
    ("memory_gb=0", "memory_gb=0 must be"),
    ("gpu=none.yaml", "gpu=none.yaml cannot be read"),
    ("model=Nothing", "diffusers has no class Nothing"),
    ("model=some/folder", "model=some/folder is no folder"),
    ("fixed.cfg=2", "fixed.cfg=2 is for task=sample"),
    ("fixed.pipe=2", "fixed.pipe cannot be planned: use one of data, cfg, ring, ulysses"),
    ("+config.num_layres=4", "no such entry, use num_layers"),
    ("+config.num_layers=many", "cannot be built with this configuration"),
    ("height=0", "height=0 must be"),
    ("fixed.ring=3", "no layout of 8 ranks has these degrees"),
]


@pytest.mark.parametrize("refused", and_others(_REFUSED))
@pytest.mark.default(1)
def test_settings_that_cannot_be_planned(refused: list[tuple[str, str]]) -> None:
    for setting, message in refused:
        add = "+" if setting.startswith("fixed.pipe") else ""  # conf/plan does not have it
        with pytest.raises(ValueError, match=re.escape(message)):
            search(request_of(_config("gpu=cpu", f"{add}{setting}")))


def _config(*settings: str) -> DictConfig:
    with initialize_config_dir(f"{conf_dir()}/plan", version_base="1.3"):
        return compose("plan", overrides=["model=wan_tiny", *settings])


def test_a_calibration_measures_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_calibration(_config("calibrate=true", "gpu=h100"), tmp_path) == 2
    assert "gpu=h100: calibrate=true measures this machine; use gpu=auto or gpu=cpu" in capsys.readouterr().err


@pytest.mark.full
def test_a_calibration_is_a_device_for_the_planner(tmp_path: Path) -> None:
    done = _plan(tmp_path, "calibrate=true", "ranks=2", "hydra.run.dir=rates", timeout=300)
    assert done.returncode == 0, done.stderr
    planned = _plan(tmp_path, "model=wan_tiny", "gpu=rates/device.yaml", "ranks=2", "hydra.run.dir=run")
    assert planned.returncode == 0, planned.stderr
    assert "not calibrated" not in planned.stdout
    device = _read(tmp_path)["device"]
    assert device["source"] == "measured"
    rates = ("tflops", "attention_share", "shards_share", "memory_gbs", "link_gbs", "call_us")
    assert all(device[name] > 0 for name in rates)


@pytest.mark.full
def test_a_multirun_ends_with_a_table_of_its_choices(tmp_path: Path) -> None:
    found = _plan(tmp_path, "-m", *_SMALL[:2], "ranks=1,2", "memory_gb=2.0001,4", "hydra.sweep.dir=run")
    assert found.returncode == 0, found.stderr
    table = found.stdout.partition("choices\n")[2] or found.stdout.partition("choices ")[2]
    rows = [line for line in table.splitlines() if "wan_tiny" in line]
    assert len(rows) == 4
    assert [("nothing fits" in row) for row in rows] == [True, False, True, False]
    assert "strategy=cp" in rows[3]
