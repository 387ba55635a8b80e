"""Precompute on several ranks: the contents of one process, and one error for all ranks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from lightning_cp.finetune.precompute import EncodingRanks, loading
from lightning_cp.latent_cache import LatentCache
from tests.harness import RankPool
from tests.unit.finetune.precompute.made import CLIPS, PICTURES, clips, contents, encoded, pictures, pipeline, pixels

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline(tmp_path_factory.mktemp("wan"), "wan")


def _run(rank: int, world: int, pipe: Path, data: Path, output: Path, settings: dict[str, Any]) -> Any:
    ranks = EncodingRanks.of_world(settings.get("vae_ranks", 1))
    done = encoded(pipe, data, output, settings, ranks)
    return done.found, done.encoded, done.stored, sorted(one.file.name for one in done.skipped)


@pytest.mark.parametrize("worlds", [(3,), (2, 3, 4)])
@pytest.mark.default(1)
def test_ranks_store_what_one_process_stores(
    flux: Path, tmp_path: Path, run_ranks: RankPool, worlds: tuple[int, ...]
) -> None:
    data = pictures(tmp_path / "data", 9)
    (data / "bad.png").write_bytes(b"x")
    (data / "bad.txt").write_text("bad")
    encoded(flux, data, tmp_path / "one", PICTURES)
    expected = contents(tmp_path / "one")
    for world in worlds:
        (found,) = set(map(str, run_ranks(world, _run, flux, data, tmp_path / f"{world}", PICTURES)))
        assert found == "(10, 9, 0, ['bad.png'])"
        assert contents(tmp_path / f"{world}") == expected
    cache = tmp_path / f"{worlds[-1]}"
    pictures(data, 12)
    assert run_ranks(2, _run, flux, data, cache, PICTURES)[0] == (13, 3, 9, ["bad.png"])  # fewer ranks
    for i in (1, 4, 7):
        Image.fromarray(pixels(70 + i, 32, 48)).save(data / f"p{i}.png")
    (data / "p5.png").unlink()
    (data / "p5.txt").unlink()
    assert run_ranks(3, _run, flux, data, cache, PICTURES)[0] == (12, 3, 8, ["bad.png"])  # changed, and gone
    encoded(flux, data, tmp_path / "one", PICTURES)
    assert contents(cache) == contents(tmp_path / "one")


@pytest.mark.full
def test_groups_encode_a_clip_together(wan: Path, tmp_path: Path, run_ranks: RankPool) -> None:
    data = clips(tmp_path / "data", 3)
    (data / "bad.mp4").write_bytes(b"x")
    (data / "bad.txt").write_text("bad")
    encoded(wan, data, tmp_path / "one", CLIPS)
    one = LatentCache(tmp_path / "one")
    for world in (2, 4):
        out, settings = tmp_path / f"{world}", {**CLIPS, "vae_ranks": 2}
        (found,) = set(map(str, run_ranks(world, _run, wan, data, out, settings)))
        assert found == "(4, 3, 0, ['bad.mp4'])"
        many = LatentCache(out)
        assert [row.id for row in many.rows] == [row.id for row in one.rows]
        for i in range(3):
            torch.testing.assert_close(many.sample(i), one.sample(i), rtol=1e-4, atol=1e-5)


def _errors(rank: int, world: int, place: str, given: tuple[Any, ...]) -> tuple[str, str, int]:
    """Run with a fault on one rank. Returns: the class and text of the error, and how many slow files were loaded."""
    pipe, data, output, settings = given
    faulty = rank == world - 1
    real, slow = loading.load_media, list[None]()
    if place == "slow" and not faulty:  # the others are busy for long unless they look for errors
        loading.load_media = lambda *a, **k: slow.append(time.sleep(0.5)) or real(*a, **k)  # type: ignore[func-returns-value]
    if place == "load" and faulty:
        pipe = Path("/nonexistent")
    if place == "memory" and faulty:

        def fails(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("no memory for this clip")

        loading.load_media = fails
    try:
        _run(rank, world, pipe, data, output, settings)
    except Exception as error:
        return type(error).__name__, str(error), len(slow)
    finally:
        loading.load_media = real
    raise AssertionError("expected an error")


@pytest.mark.parametrize(("place", "world"), [("slow", 3), ("load", 3), ("memory", 2)])
@pytest.mark.default(1)
def test_an_error_on_one_rank_ends_all_with_that_error(
    place: str, world: int, flux: Path, tmp_path: Path, run_ranks: RankPool
) -> None:
    count = 120 if place == "slow" else 12
    data, settings = pictures(tmp_path / "data", count), PICTURES
    if place == "slow":  # the first file of the last rank is bad
        names = sorted(data.glob("*.png"))
        names[world - 1].write_bytes(b"x")
        settings = {**PICTURES, "on_bad": "error", "workers": 0}
    found = run_ranks(world, _errors, place, (flux, data, tmp_path / "out", settings))
    assert len({(kind, text) for kind, text, _ in found}) == 1, found
    kind, text, _ = found[0]
    expected = {
        "slow": ("MediaError", "cannot be decoded"),
        "load": ("ValueError", "/nonexistent must be a pipeline's folder"),
        "memory": ("MemoryError", "no memory for this clip"),
    }[place]
    assert (kind, expected[1] in text) == (expected[0], True), found
    assert max(slow for _, _, slow in found) < count // world - 1, found


@pytest.mark.full
def test_an_error_in_a_group_ends_both_of_its_ranks(wan: Path, tmp_path: Path, run_ranks: RankPool) -> None:
    data = clips(tmp_path / "data", 4)
    (data / "a_bad.mp4").write_bytes(b"x")
    (data / "a_bad.txt").write_text("bad")
    settings = {**CLIPS, "vae_ranks": 2, "on_bad": "error"}
    found = run_ranks(4, _errors, "", (wan, data, tmp_path / "out", settings))
    assert len({(kind, text) for kind, text, _ in found}) == 1, found
    assert "a_bad.mp4" in found[0][1]
    (data / "a_bad.mp4").unlink()
    (data / "a_bad.txt").unlink()
    settings = {**settings, "on_bad": "skip"}
    assert run_ranks(4, _run, wan, data, tmp_path / "out", settings)[0][0] == 4
    (data / "v0.mp4").write_bytes((data / "v1.mp4").read_bytes())
    assert run_ranks(4, _run, wan, data, tmp_path / "out", settings)[0][:3] == (4, 1, 3)


def _phases(rank: int, world: int) -> list[Any]:
    """Errors of phases, in turn: the state is usable afterwards."""
    ranks, found = EncodingRanks.of_world(), list[Any]()
    for failing in (0, world - 1, None):
        counts: list[int] = []
        try:
            with ranks.phase(counts.append) as report:
                report(2)
                if rank == failing:
                    raise KeyError(f"rank {rank} failed")
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(counts[-1])
    found.append(ranks.on_first(lambda: dist.get_rank()))
    return found


def test_phases_count_all_ranks_and_keep_the_own_error_of_a_rank(run_ranks: RankPool) -> None:
    first, second, third = run_ranks(3, _phases)
    assert first == [("KeyError", "'rank 0 failed'"), ("RuntimeError", "KeyError: 'rank 2 failed'"), 6, 0]
    assert second[:2] == [("RuntimeError", "KeyError: 'rank 0 failed'"), ("RuntimeError", "KeyError: 'rank 2 failed'")]
    assert third[1:] == [("KeyError", "'rank 2 failed'"), 6, 0]


@pytest.mark.full
def test_two_thousand_sources(flux: Path, tmp_path: Path, run_ranks: RankPool) -> None:
    data = tmp_path / "data"
    data.mkdir()
    Image.fromarray(pixels(1, 16, 24)).save(data / "x.png")
    for i in range(2_000):
        os.link(data / "x.png", data / f"p{i}.png")
    rows = [{"file": f"p{i}.png", "caption": f"text {i % 5}"} for i in range(2_000)]
    (data / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run_ranks(2, _run, flux, data / "rows.jsonl", tmp_path / "out", PICTURES, timeout_s=1500)
    assert done[0] == (2_000, 2_000, 0, [])
    assert len(LatentCache(tmp_path / "out")) == 2_000
