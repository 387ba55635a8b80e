"""Caches of several folders: sizes, repeats, weights, a validation set, and what a change encodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from lightning_cp.finetune.data import hold_out
from lightning_cp.latent_cache import LatentCache, LatentData
from lightning_cp.media import DataFolder
from lightning_cp.precompute import PrecomputeSettings, precompute
from tests.unit.finetune.precompute.made import CPU, PICTURES, encoded, pictures, pipeline, pixels

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline(tmp_path_factory.mktemp("flux"))


def _run(pipe: Path, folders: list[DataFolder], output: Path) -> tuple[int, int, int]:
    done = precompute(str(pipe), folders, output, settings=PrecomputeSettings(**PICTURES), device=CPU)
    return done.encoded, done.stored, done.encoded_captions


def _folder(path: Path, seed: int) -> Path:
    path.mkdir()
    Image.fromarray(pixels(seed, 64, 96)).save(path / "x.png")
    (path / "x.txt").write_text("an x")
    return path


@pytest.mark.full
def test_a_change_of_one_folder_encodes_nothing_of_the_others(flux: Path, tmp_path: Path) -> None:
    own = DataFolder(path=pictures(tmp_path / "own", 3))
    more = DataFolder(path=_folder(tmp_path / "more", 50), sizes=((32, 48), (16, 24)), repeats=4, weight=0.25)
    out = tmp_path / "out"
    encoded(flux, own.path, out, PICTURES)
    assert _run(flux, [own, more], out) == (1, 3, 1)
    rows = {row.id: row for row in LatentCache(out).rows}
    assert sorted(rows) == ["more/x.png", "p0.png", "p1.png", "p2.png"]
    assert [(rows[id].height, rows[id].width) for id in ("p0.png", "more/x.png")] == [(24, 16), (32, 48)]
    data = LatentData(LatentCache(out))
    assert sorted(data.weights) == [0.25] * 4 + [1.0] * 3
    assert [data.cache.rows[data.row_of(i)].weight for i in range(len(data))] == data.weights
    again = replace(own, repeats=2, caption="ohwx {}"), replace(more, weight=2.0, sizes=((16, 24), (32, 48)))
    assert _run(flux, [*again], out) == (0, 4, 4)  # repeats, weights and the order of sizes: only the new captions
    cache = LatentCache(out)
    assert {(row.repeats, row.weight) for row in cache.rows} == {(2, 1.0), (4, 2.0)}
    assert {cache.caption(row.captions[0]) for row in cache.rows} == {
        "an x",
        "ohwx picture 0",
        "ohwx picture 1",
        "ohwx picture 2",
    }
    assert _run(flux, [own, replace(more, sizes=((16, 24),))], out) == (1, 3, 0)  # its pictures only
    assert _run(flux, [own, more], out) == (0, 4, 0)  # and back
    assert _run(flux, [own], out) == (0, 3, 0)
    assert len(LatentCache(out)) == 3


def test_one_folder_at_two_sizes_is_held_out_by_file(flux: Path, tmp_path: Path) -> None:
    own = pictures(tmp_path / "own", 4)
    folders = [DataFolder(path=own), DataFolder(path=own, name="small", sizes=((8, 16), (16, 8)))]
    folders.append(DataFolder(path=_folder(tmp_path / "class", 60), use="prior", weight=0.5))
    _run(flux, folders, tmp_path / "out")
    data = LatentData(LatentCache(tmp_path / "out"))
    assert len(data) == 9
    for seed in range(6):
        training, held_out = hold_out(data, 2, seed=seed)
        assert held_out is not None
        kept = [data.cache.rows[data.row_of(i)] for i in training.indices]
        left_out = [data.cache.rows[i] for i in held_out.rows]
        assert {row.source for row in kept}.isdisjoint(row.source for row in left_out)
        assert (len(kept), len(left_out)) == (7, 2)  # both sizes of a file
        assert [row.use for row in kept].count("prior") == 1
        assert training.weights.count(0.5) == 1


def test_a_validation_set_is_not_trained_on(flux: Path, tmp_path: Path) -> None:
    folders = [
        DataFolder(path=pictures(tmp_path / "own", 3), repeats=2),
        DataFolder(path=_folder(tmp_path / "held_out", 70), repeats=5, use="validation"),
    ]
    _run(flux, folders, tmp_path / "out")
    data = LatentData(LatentCache(tmp_path / "out"))
    training, held_out = hold_out(data, 0)
    assert held_out is not None
    assert (len(data), len(training)) == (6, 6)
    assert [data.cache.rows[i].id for i in held_out.rows] == ["held_out/x.png"]
    with pytest.raises(ValueError, match="count=1 must be 0: the data have a validation set of 1 samples"):
        hold_out(data, 1)
    assert _run(flux, [folders[0], replace(folders[1], use="train")], tmp_path / "out") == (0, 4, 0)
    assert len(LatentData(LatentCache(tmp_path / "out"))) == 11
