"""recipes/sample.py: a checkpoint gives the same pictures on any ranks; folders of pipelines."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.e2e.recipe import ROOT, SMALL, Finished, run, started
from tests.pipelines import PIPES

RECIPE = ROOT / "recipes" / "sample.py"


def sampled(*overrides: str, folder: Path, progress: str = "false") -> Finished:
    with started(*overrides, f"progress={progress}", folder=folder, script=RECIPE) as process:
        stdout, stderr = process.communicate(timeout=150)
        return Finished(process.returncode, stdout, stderr, folder)


def pictures(folder: Path) -> np.ndarray:
    """[n, h, w], in order."""
    return np.stack([picture(path) for path in sorted(folder.glob("samples/*.png"))])


def picture(path: Path) -> np.ndarray:
    """Picture of a file, or its first frame: [h, w], grey."""
    with Image.open(path) as read:
        return np.asarray(read.convert("L")).astype(int)


def size_of(path: Path) -> tuple[int, int, int]:
    """Width, height, frames."""
    with Image.open(path) as read:
        return (*read.size, getattr(read, "n_frames", 1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of recipes/train.py."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = run(*SMALL, "max_steps=4", "output_root=..", folder=folder)
    assert done.exit_code == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def alone(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its samples, from one process."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    done = sampled(f"output_root={trained.parent}", folder=folder)  # source=last
    assert done.exit_code == 0, done.stderr
    return folder


@pytest.mark.full
def test_a_checkpoint_of_the_main_job_is_sampled_out_of_the_box(alone: Path) -> None:
    assert pictures(alone).shape == (10, 8, 8)
    assert len({one.tobytes() for one in pictures(alone)}) == 10
    assert size_of(alone / "contact_sheet.png")[0] > 300
    assert set(json.loads((alone / "timings.json").read_text())) == {"load", "denoise", "write"}


@pytest.mark.full
@pytest.mark.parametrize(
    "degrees", [("ring=3",), ("ulysses=2", "cfg=2"), ("cfg=2", "data_parallel=2", "precision=bf16-mixed")], ids="-".join
)
def test_pictures_are_the_same_at_every_degree(
    alone: Path, trained: Path, tmp_path: Path, degrees: tuple[str, ...]
) -> None:
    done = sampled(f"source={trained}", "strategy=cp", *degrees, folder=tmp_path / "out", progress="true")
    assert done.exit_code == 0, done.stderr
    assert "steps: 100%" in done.stderr
    most = 40 if "precision=bf16-mixed" in degrees else 1
    assert np.abs(pictures(tmp_path / "out") - pictures(alone)).max() <= most


@pytest.mark.full
def test_requested_classes_are_sampled_by_data_groups_in_order(alone: Path, trained: Path, tmp_path: Path) -> None:
    options = ("prompts=[7,1,1]", "num_samples=1", "strategy=cp", "data_parallel=2")
    done = sampled(f"source={trained}", *options, folder=tmp_path / "out")
    assert "steps:" not in done.stderr
    assert done.exit_code == 0, done.stderr
    found = pictures(tmp_path / "out")
    assert len(found) == 3
    assert np.abs(found[1] - pictures(alone)[1]).max() <= 1  # class 1 from the noise of sample 1, as there


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as diffusers writes it."""
    folder = tmp_path_factory.mktemp("pipeline") / "wan"
    PIPES["wan"].pipe().save_pretrained(folder)
    return folder


CALL = (
    "+call.height=48",
    "+call.width=80",
    "+call.num_frames=5",
    "num_inference_steps=2",
    "negative_prompt=a slow dog",
)


def test_a_pipeline_is_sampled_over_branches_and_data_groups(pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\n\na house\nrain on the sea\n")
    options = ("strategy=cp", "cfg=2", "data_parallel=2", f"prompts={tmp_path}/prompts.txt", "seed=3")
    done = sampled(f"source={pipeline}", *options, *CALL, folder=tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    clips = sorted((tmp_path / "out" / "samples").iterdir())
    assert [clip.name for clip in clips] == ["0000.gif", "0001.gif", "0002.gif"]
    assert [size_of(clip) for clip in clips] == [(80, 48, 5)] * 3
    assert set(json.loads((tmp_path / "out" / "timings.json").read_text())) == {
        "load",
        "encode",
        "denoise",
        "decode",
        "write",
        "fastest_call",
    }
    assert (tmp_path / "out" / "contact_sheet.png").is_file()
    sweep = ("hydra.mode=MULTIRUN", f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=third")
    third = sampled(*sweep, f"source={pipeline}", "prompts=rain on the sea", "seed=5", *CALL, folder=tmp_path / "third")
    assert third.exit_code == 0, third.stderr
    one = picture(tmp_path / "third" / "samples" / "0000.gif")
    assert np.abs(one - picture(clips[2])).max() <= 2
    with (tmp_path / "sweep.csv").open() as file:
        (job,) = csv.DictReader(file)
    assert 0 < float(job["call_s"]) < float(job["seconds"])


@pytest.mark.full
def test_a_pipeline_is_sampled_in_stages_of_blocks(pipeline: Path, tmp_path: Path) -> None:
    options = (f"source={pipeline}", "prompts=[rain on the sea]", "seed=5", *CALL)
    alone = sampled(*options, folder=tmp_path / "alone")
    staged = sampled(*options, "strategy=cp", "pipe=2", "precision=32-true", folder=tmp_path / "staged")
    for done in (alone, staged):
        assert done.exit_code == 0, done.stderr
    assert "Warning" not in staged.stderr
    one, other = (picture(folder / "samples" / "0000.gif") for folder in (tmp_path / "alone", tmp_path / "staged"))
    assert np.abs(one - other).max() <= 2


@pytest.mark.full
def test_a_step_cache_gives_the_same_pictures_on_ranks(trained: Path, tmp_path: Path) -> None:
    cache = (f"source={trained}", "cache=first_block", "cache.threshold=0.3", "num_samples=5")
    alone = sampled(*cache, folder=tmp_path / "alone")
    together = sampled(*cache, "strategy=cp", "ring=2", "cfg=2", folder=tmp_path / "together")
    for done in (alone, together):
        assert done.exit_code == 0, done.stderr
    said = [re.search(r"The step cache skipped ([\d.]+)%", done.stdout) for done in (alone, together)]
    assert said[0]
    assert said[1]
    assert said[0][1] == said[1][1]
    assert float(said[0][1]) > 5
    assert np.abs(pictures(alone.folder) - pictures(together.folder)).max() <= 2


@pytest.mark.full
def test_a_step_cache_of_a_pipeline(pipeline: Path, tmp_path: Path) -> None:
    """The recipe gives the cache the pipeline's timestep."""
    cache = ("cache=broadcast", "cache.spatial_attention_timestep_skip_range=[-1,1001]")
    call = ("prompts=[a cat]", "num_inference_steps=3", "+call.height=48", "+call.width=80", "+call.num_frames=5")
    done = sampled(f"source={pipeline}", *cache, *call, folder=tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert float(re.search(r"The step cache skipped ([\d.]+)%", done.stdout)[1]) > 5


@pytest.mark.full
def test_an_argument_that_the_pipeline_does_not_take_is_named(pipeline: Path, tmp_path: Path) -> None:
    done = sampled(f"source={pipeline}", "prompts=a cat", "+call.size=3", folder=tmp_path / "out")
    assert done.exit_code == 1
    assert "WanPipeline has no argument size; its arguments: prompt, negative_prompt, height" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_help_lists_every_setting() -> None:
    command = [sys.executable, str(RECIPE), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True).stdout
    listed = {word for line in shown.splitlines() if line.startswith("  ") for word in line.replace(",", " ").split()}
    given = (ROOT / "conf" / "sample.yaml").read_text().split("\nhydra:")[0].splitlines()
    keys = {line.partition(":")[0] for line in given if line and line[0].isalpha()} - {"defaults", "sweep"}
    assert keys <= listed
