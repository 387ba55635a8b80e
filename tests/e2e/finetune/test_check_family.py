"""recipes/check_family.py on a pipeline's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.families.cases import made
from tests.harness import warm
from tests.harness.cases import and_others
from tests.pipelines import PIPES

_RECIPE = Path(__file__).parents[3] / "recipes" / "check_family.py"


def _check(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, str(_RECIPE), *settings], cwd=folder, timeout=240)


@pytest.mark.full
def test_all_proofs_of_a_pipeline_pass(tmp_path: Path) -> None:
    torch.manual_seed(0)
    PIPES["wan_two_experts"].make().save_pretrained(tmp_path / "pipeline")
    completed = _check(tmp_path, "pretrained=pipeline", "height=32", "width=48")
    assert completed.returncode == 0, completed.stderr
    assert "WanPipeline: family wan" in completed.stdout
    for proof in ("capture", "oracle", "batch", "topology ring=2"):
        assert proof in completed.stdout
    assert completed.stdout.count("passed") == 4
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline"]


@pytest.mark.full
def test_proofs_of_a_side_model_pass_on_three_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    PIPES["flux_controlnet"].make().save_pretrained(tmp_path / "pipeline")
    completed = _check(tmp_path, "pretrained=pipeline", "ranks=3", "height=16", "width=24")
    assert completed.returncode == 0, completed.stderr
    assert ": family flux_controlnet" in completed.stdout
    assert completed.stdout.count("passed") == 4


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_proofs_of_a_modular_pipeline_pass(tmp_path: Path) -> None:
    made("minimax_h3").save_pretrained(str(tmp_path / "pipeline"))
    completed = _check(tmp_path, "pretrained=pipeline", "height=16", "width=32")
    assert completed.returncode == 0, completed.stderr
    assert "MiniMaxH3ModularPipeline: family minimax_h3" in completed.stdout
    assert completed.stdout.count("passed") == 4


@pytest.mark.full
def test_what_a_pipeline_cannot_do_is_one_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    PIPES["wan"].make().save_pretrained(tmp_path / "pipeline")
    refused = {"height=33": "must be a multiple of 16", "pretrained=nothing": "must be a pipeline's folder, or the id"}
    for setting, message in refused.items():
        completed = _check(tmp_path, "pretrained=pipeline", setting)
        assert completed.returncode == 2
        assert completed.stderr.splitlines()[-1].startswith(f"error: {setting} {message}")
        assert "Traceback" not in completed.stderr


_REFUSED = [
    (("pretrained=x", "dtype=float16"), "dtype=float16 must be one of float32, bfloat16"),
    ((), "pretrained=<folder of a pipeline> must be given"),
    (("pretrained=x", "ranks=0"), "ranks=0 must be 1 or more"),
    (("pretrained=x", "captions=[one]"), "must be a list of two captions or more"),
]


@pytest.mark.parametrize("refused", and_others(_REFUSED))
@pytest.mark.default(1)
def test_bad_settings_are_refused(tmp_path: Path, refused: list[tuple[tuple[str, ...], str]]) -> None:
    for settings, message in refused:
        completed = _check(tmp_path, *settings)
        assert completed.returncode == 2
        assert message in completed.stderr
        assert "Traceback" not in completed.stderr
