"""Edit the captions of a cache: only what changed is encoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_cp.families import family_for
from lightning_cp.finetune.precompute import encode
from lightning_cp.latent_cache import LatentCache, LatentData
from tests.families.cases import made
from tests.unit.finetune.precompute.made import PICTURES, contents, encoded, pipeline, pixels

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline(tmp_path_factory.mktemp("flux"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every caption that the text encoders get, and "media" for each call of the VAE's encoder."""
    found: list[str] = []
    kind = type(family_for(made("flux")))
    text, media = kind.encode_text, kind.encode_media
    monkeypatch.setattr(kind, "encode_text", lambda *a, **k: found.extend(a[2]) or text(*a, **k))
    monkeypatch.setattr(kind, "encode_media", lambda *a, **k: found.append("media") or media(*a, **k))
    return found


def _table(folder: Path, captions: list[list[str]]) -> Path:
    """Write pictures and a table with their captions."""
    folder.mkdir(exist_ok=True)
    rows = []
    for i, texts in enumerate(captions):
        if not (folder / f"p{i}.png").exists():
            Image.fromarray(pixels(i, 16, 24)).save(folder / f"p{i}.png")
        rows.append(json.dumps({"file": f"p{i}.png", "captions": texts}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


@pytest.mark.parametrize("number", [100, 1000])
@pytest.mark.default(1)
def test_ten_edited_captions_encode_ten(number: int, flux: Path, tmp_path: Path, calls: list[str]) -> None:
    captions = [[f"caption {i} of picture {p}" for i in range(number // 4)] for p in range(4)]
    data, out = _table(tmp_path / "data", captions), tmp_path / "out"
    first = encoded(flux, data, out, {**PICTURES, "text_batch": 100})
    assert (first.captions, first.encoded_captions, first.encoded) == (number + 1, number + 1, 4)
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    calls.clear()
    edited = [(p, i) for p in range(4) for i in (3, 17, 24)][:10]
    for p, i in edited:
        captions[p][i] = f"edited {i} of picture {p}"
    again = encoded(flux, _table(tmp_path / "data", captions), out, {**PICTURES, "text_batch": 1})
    assert sorted(calls) == sorted(captions[p][i] for p, i in edited)
    assert (again.encoded_captions, again.encoded, again.stored) == (10, 0, 4)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    cache = LatentCache(out)
    assert [[cache.caption(hash) for hash in row.captions] for row in cache.rows] == captions
    calls.clear()
    captions[1] = captions[1][:1]  # captions are removed, a picture is added, another one removed
    captions.append(["a new picture"])
    data = _table(tmp_path / "data", captions)
    data.write_text("\n".join(data.read_text().splitlines()[1:]))
    last = encoded(flux, data, out, {**PICTURES, "text_batch": 1})
    assert calls == ["a new picture", "media"]
    assert (last.encoded_captions, last.encoded, last.stored, last.dropped) == (1, 1, 3, 1)
    assert [row.id for row in LatentCache(out).rows] == ["p1.png", "p2.png", "p3.png", "p4.png"]
    assert len(LatentData(LatentCache(out))) == 4


@pytest.mark.full
@pytest.mark.parametrize("killed_at", [1, 3])
def test_a_run_that_is_killed_between_two_edited_captions_is_continued(
    killed_at: int, flux: Path, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captions = [["a cat"], ["a dog"], ["a fish"]]
    data, out = _table(tmp_path / "data", captions), tmp_path / "out"
    settings: dict[str, Any] = {**PICTURES, "text_batch": 1}
    encoded(flux, data, out, settings)
    captions = [["a cat, edited", "another cat"], ["a dog, edited"], ["a fish, edited"]]
    data = _table(tmp_path / "data", captions)
    Image.fromarray(pixels(77, 16, 24)).save(data.with_name("p2.png"))
    calls.clear()
    add = encode.CacheWriter.add_text

    def stops(*args: Any, **kwargs: Any) -> str:
        if len(calls) > killed_at:
            raise KeyboardInterrupt
        return add(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(encode.CacheWriter, "add_text", stops)
        with pytest.raises(KeyboardInterrupt):
            encoded(flux, data, out, settings)
    with pytest.raises(ValueError, match="is not complete"):
        LatentCache(out)
    calls.clear()
    done = encoded(flux, data, out, settings)
    assert len(calls) == 4 - killed_at + 1  # the other captions, and the changed picture
    assert (done.encoded_captions, done.encoded, done.stored, done.changed) == (4 - killed_at, 1, 2, 1)
    encoded(flux, data, tmp_path / "new", settings)
    assert contents(out) == contents(tmp_path / "new")
