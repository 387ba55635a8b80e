"""bench=long_clips: activations that fall with ranks, the search for the longest clip, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_cp.planning.models import MediaSize
from lightning_cp.recipes.benchmarks.long_clips.activations import activation_rows
from lightning_cp.recipes.benchmarks.long_clips.curve import ClipRow, layout_of, longest
from lightning_cp.recipes.benchmarks.long_clips.report import write
from lightning_cp.recipes.benchmarks.long_clips.run import check_settings
from lightning_cp.recipes.runs.command import conf_dir


def _config(*overrides: str) -> DictConfig:
    with initialize_config_dir(conf_dir("bench"), version_base="1.3"):
        return compose("bench", ["bench=long_clips", *overrides])


@pytest.mark.full
def test_activations_fall_with_ranks_under_checkpointing() -> None:
    given: Any = _config().activations
    size = MediaSize(**given.size)
    _, row = activation_rows(given.config, size, lora_rank=16, ranks=[1, 8], checkpointing=["full"])
    assert row.ranks == 8
    assert row.share <= 1.1


def _with_two_slopes(n: int) -> int:
    return max(100 + 3 * n, 7 * n)


@pytest.mark.parametrize("first", [(1, 5), (1, 257), (40, 50)])
@pytest.mark.parametrize("available", [103, 160, 175, 177, 700, 701, 6999])
def test_the_longest_clip_fits_and_the_next_does_not(available: int, first: tuple[int, int]) -> None:
    found = longest(_with_two_slopes, available, first)
    assert _with_two_slopes(found) <= available < _with_two_slopes(found + 1)


def test_few_lengths_are_counted_where_memory_is_affine() -> None:
    counted = []

    def size(n: int) -> int:
        counted.append(n)
        return 1000 + 17 * n

    assert longest(size, 9999, (1, 5)) == (9999 - 1000) // 17
    assert len(counted) == 4, "two for the line, the longest one, and the next"


def test_nothing_fits() -> None:
    assert longest(lambda n: 100 + n, 50, (1, 5)) == 0


def test_layouts_have_all_ranks() -> None:
    assert [layout_of(n, sharded=True).ranks for n in (1, 2, 4, 8, 16, 64)] == [1, 2, 4, 8, 16, 64]


def test_rows_are_written(tmp_path: Path) -> None:
    peak = {"weights": 3 * 10**9, "activations": 4 * 10**9, "buffers": 10**9}
    rows = [ClipRow(24, "LoRA, weights sharded", n, 21 * n, peak, "block 2 backward", 9 * 10**9) for n in (1, 2)]
    rows.append(ClipRow(24, "full, weights sharded", 1, 0, {"weights": 30 * 10**9}, "begin", 30 * 10**9))
    page, data, picture = write([], rows, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "| 24 | 2 | 165 | 10 | 151,200 | 8.0 | 4.0 | activations | block 2 backward | 16.5 | 500 |" in text
    assert "| LoRA, weights sharded | 24 | 81 | 165 | 250 to 500 | 2.000 |" in text
    assert "| full, weights sharded | 24 | – | – | – | – |" in text
    assert "| full, weights sharded | 24 | 1 | – | – | – | 30.0 for one frame |" in text
    assert [row["frames"] for row in json.loads(data.read_text(encoding="utf-8"))["clips"]] == [81, 165, 0]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("parts=[clip]", "parts=['clip'] is not valid: must be some of activations, clips"),
        ("ranks=[3]", "ranks=[3]: must be 1, 2, 4 or multiples of 8"),
        ("long_clips.memory_gb=[2]", "memory_gb=2 must be a number above reserved_gb=2"),
        ("long_clips.trainings=[all]", "trainings=['all'] is not valid: must be some of LoRA, weights replicated"),
    ],
)
def test_wrong_settings_are_refused(setting: str, said: str) -> None:
    assert check_settings(_config()) == ""
    assert said in check_settings(_config(setting))
