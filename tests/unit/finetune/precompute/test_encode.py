"""Results of a run: every bit of the families' encodings, counts, and refusals of changed inputs."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ExifTags, Image

from lightning_cp.errors import CacheError, DataError, FamilyError, MediaError, StaleCacheError
from lightning_cp.families import family_for, load_family
from lightning_cp.family_check import store
from lightning_cp.files import open_regular
from lightning_cp.finetune.latent_cache import LatentCache, LatentData, caption_hash
from lightning_cp.finetune.media.images import image_size, read_image
from lightning_cp.finetune.precompute import loading
from lightning_cp.finetune.precompute.run import draw_contact_sheet
from lightning_cp.finetune.precompute.usable import usable
from lightning_cp.media import Bucket, find_sources, load_media
from tests.families.cases import CASES, made
from tests.unit.finetune.latent_cache.made import bits
from tests.unit.finetune.media.encode import noise, write_clip
from tests.unit.finetune.precompute.made import CLIPS, PICTURES, clips, contents, encoded, pictures, pipeline, pixels

pytestmark = pytest.mark.filterwarnings("ignore")


KINDS = ("flux_kontext", "flux2_reference", "ltx2", "hunyuan_video15", "wan_vace")
"""Pictures, clips, references and control clips, sound, latents packed, normalised and in patches."""


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline(tmp_path_factory.mktemp("wan"), "wan")


def test_references_must_be_of_all_pictures_or_of_none(tmp_path: Path) -> None:
    family, buckets = load_family("flux2", {"pixels": 16}), [Bucket(1, 32, 48)]
    for name in ("a", "b", "b.reference"):
        Image.fromarray(pixels(0, 32, 48)).save(tmp_path / f"{name}.png")
    found = find_sources(tmp_path, captions="optional")
    with pytest.raises(DataError, match=r"b\.png has a reference, and .*a\.png has none: flux2 trains with a ref"):
        usable(found, family, {None: buckets})
    (tmp_path / "a.png").unlink()
    assert len(usable(find_sources(tmp_path, captions="optional"), family, {None: buckets}).sources) == 1
    assert len(usable(found, load_family("flux", {"pixels": 16}), {None: buckets}).sources) == 2  # without references


def test_media_that_fit_no_size_are_skipped_before_captions_are_encoded(flux: Path, tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", 2)
    for name, size, orientation in (("a.jpg", (16, 12), 1), ("b.png", (12, 16), 6), ("c.tiff", (16, 12), 8)):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        Image.new("RGB", size).save(data / name, exif=exif)  # size: width, height
        (data / f"{name[0]}.txt").write_text(f"picture {name}\n")
        assert image_size(data / name) == tuple(read_image(data / name).shape[1:])
    settings = {**PICTURES, "sizes": [[16, 24]]}
    result = encoded(flux, data, tmp_path / "out", settings)
    assert [one.file.name for one in result.skipped] == ["c.tiff"]
    assert "is too small: 12x16 pixels must be enlarged 2.00 times for 24x16" in result.skipped[0].reason
    assert (result.found, result.encoded, result.captions) == (5, 4, 6)  # with the empty caption
    with pytest.raises(MediaError, match=r"c\.tiff: is too small"):
        encoded(flux, data, tmp_path / "strict", {**settings, "on_bad": "error"})
    assert not (tmp_path / "strict").exists()


@pytest.mark.parametrize(
    ("size", "name", "reason"),
    [
        ((8, 6), "a.png", r"a\.png: is too small: 8x6 pixels"),
        ((8, 6), "b.mask.png", r"b\.mask\.png: is a mask of 8x6 pixels, but its picture or clip has 48x32"),
        ((8, 6), "b.reference.png", r"b\.reference\.png: is too small: 8x6 pixels"),
        (None, "a.png", r"a\.png: cannot be decoded"),
        (None, "b.reference.png", r"b\.reference\.png: cannot be decoded"),
    ],
)
@pytest.mark.default(2)
def test_media_are_refused_before_weights_are_loaded(
    size: tuple[int, int] | None, name: str, reason: str, tmp_path: Path
) -> None:
    pipe, data = pipeline(tmp_path / "pipe", "flux_kontext"), tmp_path / "data"
    data.mkdir()
    for weights in pipe.rglob("*.safetensors"):
        weights.unlink()
    settings = {**PICTURES, "on_bad": "error", "captions": "optional"}
    for file in ("a.png", "a.reference.png", "b.png", "b.reference.png", name):
        Image.new("RGB", (48, 32)).save(data / file)
    with pytest.raises(ValueError, match="cannot be loaded"):
        encoded(pipe, data, tmp_path / "out", settings)
    (data / name).write_bytes(b"no picture") if size is None else Image.new("RGB", size).save(data / name)
    with pytest.raises(MediaError, match=reason):
        encoded(pipe, data, tmp_path / "out", settings)
    for picture in data.iterdir():
        picture.write_bytes(b"no picture")
    with pytest.raises(DataError, match="none of the 2 pictures and videos can be used: "):
        encoded(pipe, data, tmp_path / "out", {**settings, "on_bad": "skip"})


def test_control_clips_are_for_clips_and_for_families_that_take_them(tmp_path: Path) -> None:
    for name in ("a.reference", "b"):
        Image.fromarray(pixels(0, 32, 48)).save(tmp_path / f"{name}.png")
    for name in ("a.mp4", "b.reference.mp4", "c.mp4", "c.reference.mp4"):
        (tmp_path / name).write_bytes(b"")
    buckets, facts = [Bucket(1, 32, 48), Bucket(5, 32, 48)], {"spatial": 8, "temporal": 4, "patch": [1, 2, 2]}
    found = find_sources(tmp_path, captions="optional")
    kept = usable(found, load_family("wan_vace", facts), {None: buckets})
    assert [source.id for source in kept.sources] == ["c.mp4"]
    assert {(one.file.name, one.reason) for one in kept.skipped} == {
        ("a.mp4", "is a video, but its reference a.reference.png is a picture: wan_vace takes two of a kind"),
        ("b.png", "is a picture, but its reference b.reference.mp4 is a video: wan_vace takes two of a kind"),
    }
    kept = usable(found, load_family("wan", facts), {None: buckets})
    assert [source.id for source in kept.sources] == ["a.mp4"]
    reason = "has the video {}.reference.mp4 as its reference, but wan takes no control clips"
    assert {(one.file.name, one.reason) for one in kept.skipped} == {
        ("b.png", reason.format("b")),
        ("c.mp4", reason.format("c")),
    }


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.default(1)
def test_stored_tensors_are_bit_for_bit_those_of_the_family(case: str, tmp_path: Path) -> None:
    frames, height, width = CASES[case].size
    data = clips(tmp_path / "data", 2, frames) if frames > 1 else pictures(tmp_path / "data", 2)
    suffix = ".mp4" if frames > 1 else ".png"
    rows = [{"file": file.name, "caption": f"text of {file.stem}"} for file in sorted(data.glob(f"*{suffix}"))]
    if CASES[case].reference:
        Image.fromarray(pixels(9, 40, 40)).save(data / "other.jpg")
        reference = "v1.mp4" if family_for(made(case)).reference_clips else "other.jpg"
        rows = [{**row, "reference": reference} for row in rows]
    (data / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"sizes": [[height, width]], "frames": frames, "dtype": torch.float32, "text_batch": 1}
    settings["max_upscale"] = 60
    if family_for(made(case)).sound_rate is not None:
        settings["fps"] = 24.0
        write_clip(data / "v0.mkv", noise(2, 16_000), frames=max(24, frames)).rename(
            data / "v0.mp4"
        )  # the other clip has no sound
    done = encoded(pipeline(tmp_path / "pipe", case), data / "rows.jsonl", tmp_path / "out", {**settings, "sheet": 2})
    cache, pipe, family = LatentCache(tmp_path / "out"), made(case), family_for(made(case))
    texts = 2 if family.text.sees_media else 3  # with the empty caption
    assert (done.found, done.encoded, done.stored, done.captions, done.skipped) == (2, 2, 0, texts, ())
    assert cache.family().facts == family.facts
    for i, source in enumerate(find_sources(data / "rows.jsonl").sources):
        size = Bucket(frames, height, width)
        loaded = load_media(
            source,
            [size],
            max_upscale=60,
            reference_size=family.reference_size,
            fps=settings.get("fps"),
            sound_rate=family.sound_rate,
        )
        given = {"pixels": loaded.pixels[None]}
        for name, x in (("reference", loaded.reference), ("sound", loaded.sound)):
            if x is not None:
                given[name] = x[None]
        if loaded.fps is not None:
            given["fps"] = torch.tensor([loaded.fps])
        (expected,) = store(family, pipe, [source.captions[0]], given)
        assert bits(cache.sample(i)) == bits(expected)
    if family.text.sees_media:
        assert cache.empty_text is None
    elif case.startswith("minimax_h3"):  # one token: kernels for vectors round by the addresses of the weights
        assert torch.allclose(cache.empty_text["prompt_embeds"], family.encode_text(pipe, [""])[0]["prompt_embeds"])
    else:
        assert bits(cache.empty_text) == bits(family.encode_text(pipe, [""])[0])
    with Image.open(tmp_path / "out" / "contact_sheet.png") as sheet:
        assert min(sheet.size) >= 192


@pytest.mark.full
def test_clips_with_sound_need_a_frame_rate(tmp_path: Path) -> None:
    data = clips(tmp_path / "data", 1, 17)
    settings = {"sizes": [[64, 96]], "frames": 17, "max_upscale": 60}
    with pytest.raises(FamilyError, match=r"ltx2 trains on clips with sound, .* such as precompute\.fps=24$"):
        encoded(pipeline(tmp_path / "pipe", "ltx2"), data, tmp_path / "out", settings)


def test_equal_captions_and_the_empty_one_are_encoded_once(flux: Path, tmp_path: Path, monkeypatch: Any) -> None:
    given: list[list[str]] = []
    kind = type(family_for(made("flux")))
    encode = kind.encode_text
    monkeypatch.setattr(kind, "encode_text", lambda *a, **k: given.append(list(a[2])) or encode(*a, **k))
    done = encoded(flux, pictures(tmp_path / "data"), tmp_path / "out", {**PICTURES, "text_batch": 4})
    texts = ["", "picture 0", "another text", "picture 1", "picture 2", "picture 3"]
    assert given == [texts[:4], [*texts[4:], "", ""]]  # equal batches, whatever is left
    assert done.captions == 6
    hashes = {row.captions for row in LatentCache(tmp_path / "out").rows}
    assert (caption_hash("picture 0"), caption_hash("another text")) in hashes


def test_a_second_run_stores_nothing_and_new_files_are_added(flux: Path, tmp_path: Path) -> None:
    data, out = pictures(tmp_path / "data", 4), tmp_path / "out"
    encoded(flux, data, out, PICTURES)
    first = contents(out)
    files = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    again = encoded(flux, data, out, {**PICTURES, "sizes": ((24, 16), (16, 24)), "frames": None})
    assert (again.found, again.encoded, again.stored) == (4, 0, 4)
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")} == files
    pictures(data, 6)
    for i in range(4):  # rewritten with the same contents
        os.utime(data / f"p{i}.png")
    more = encoded(flux, data, out, PICTURES)
    assert (more.found, more.encoded, more.stored) == (6, 2, 4)
    assert {name: value for name, value in contents(out).items() if name in first} == first


def test_what_changed_is_named(flux: Path, tmp_path: Path) -> None:
    data, out = pictures(tmp_path / "data", 3), tmp_path / "out"
    encoded(flux, data, out, PICTURES)
    (data / "p1.txt").write_text("new")
    assert encoded(flux, data, out, PICTURES).stored == 3  # only the new caption is encoded
    assert {row.id: row.captions for row in LatentCache(out).rows}["p1.png"] == (caption_hash("new"),)
    LatentCache(out).verify()
    pictures(data, 3)
    Image.fromarray(pixels(77, 32, 48)).save(data / "p2.png")
    done = encoded(flux, data, out, PICTURES)
    assert (done.encoded, done.stored, done.changed, done.dropped) == (1, 2, 1, 0)
    pictures(data, 3)
    with pytest.raises(StaleCacheError, match="vae_dtype"):
        encoded(flux, data, out, {**PICTURES, "vae_dtype": torch.bfloat16})
    with pytest.raises(StaleCacheError, match="sizes"):
        encoded(flux, data, out, {**PICTURES, "sizes": [[16, 24]]})
    pipe = made("flux")
    other = pipeline(tmp_path / "other")
    changed = type(pipe.vae).from_pretrained(other, subfolder="vae")
    with torch.no_grad():
        changed.encoder.conv_in.weight += 1
    changed.save_pretrained(other / "vae")
    with pytest.raises(StaleCacheError, match="the weights of vae changed"):
        encoded(other, data, out, PICTURES)
    assert encoded(flux, data, out, PICTURES).stored == 3  # refusals have not harmed it


def test_a_cache_without_samples_takes_other_settings(flux: Path, tmp_path: Path) -> None:
    data, out = pictures(tmp_path / "data", 2), tmp_path / "out"
    cut = tmp_path / "cut"
    cut.mkdir()
    for file in data.glob("*.png"):
        Image.open(file).save(cut / f"{file.stem}.jpg")
        (cut / f"{file.stem}.jpg").write_bytes((cut / f"{file.stem}.jpg").read_bytes()[:-100])  # the header is whole
    with pytest.raises(DataError, match="none of the 2 files could be used"):
        encoded(flux, cut, out, {**PICTURES, "dtype": torch.bfloat16, "captions": "optional"})
    assert encoded(flux, data, out, PICTURES).encoded == 2
    encoded(flux, data, tmp_path / "alone", PICTURES)
    assert contents(out) == contents(tmp_path / "alone")
    LatentCache(out).verify()


@pytest.mark.full
def test_changed_pictures_are_encoded_again_and_removed_ones_are_not_used(flux: Path, tmp_path: Path) -> None:
    data, out = pictures(tmp_path / "data", 6), tmp_path / "out"
    encoded(flux, data, out, PICTURES)
    first, files = contents(out), {path: path.read_bytes() for path in out.rglob("*.safetensors")}
    reader = LatentCache(out)
    before = [bits(reader.sample(i)) for i in range(6)]
    Image.fromarray(pixels(77, 48, 32)).save(data / "p2.png")
    Image.fromarray(pixels(78, 32, 48)).save(data / "p3.png")
    (data / "p1.png").unlink()
    (data / "p5.png").write_bytes(b"x")
    done = encoded(flux, data, out, PICTURES)
    assert (done.found, done.encoded, done.stored, len(done.skipped)) == (6, 2, 2, 2)  # p1.txt is the second one
    assert (done.changed, done.dropped) == (3, 1)
    encoded(flux, data, tmp_path / "new", PICTURES)
    assert contents(out) == contents(tmp_path / "new") != first
    assert len(LatentData(LatentCache(out))) == 4
    assert [bits(reader.sample(i)) for i in range(6)] == before  # opened before the change
    assert {path: path.read_bytes() for path in files} == files
    pictures(data, 6)
    done = encoded(flux, data, out, PICTURES)  # the old files are back
    assert (done.encoded, done.stored, done.changed, done.dropped) == (0, 6, 0, 0)
    assert contents(out) == first
    other = pictures(tmp_path / "other", 1)
    (other / "p0.png").rename(other / "q0.png")
    (other / "p0.txt").rename(other / "q0.txt")
    assert encoded(flux, other, out, PICTURES).dropped == 6
    assert encoded(flux, data, out, PICTURES).stored == 6  # another folder by mistake loses nothing


@pytest.mark.full
def test_a_changed_reference_is_encoded_again(tmp_path: Path) -> None:
    data, pipe, out = pictures(tmp_path / "data", 1), pipeline(tmp_path / "pipe", "flux_kontext"), tmp_path / "out"
    table = data / "rows.csv"
    table.write_text("file,caption,reference\np0.png,a cat,ref.png\n")
    Image.fromarray(pixels(5, 48, 32)).save(data / "ref.png")
    encoded(pipe, table, out, PICTURES)
    Image.fromarray(pixels(6, 48, 32)).save(data / "ref.png")
    done = encoded(pipe, table, out, PICTURES)
    assert (done.encoded, done.stored, done.changed) == (1, 0, 1)
    encoded(pipe, table, tmp_path / "again", PICTURES)
    assert contents(out) == contents(tmp_path / "again")
    table.write_text("file,caption\np0.png,a cat\n")
    with pytest.raises(DataError, match=r'none of the 1 files could be used.*needs a "reference" picture'):
        encoded(pipe, table, tmp_path / "new", PICTURES)


def test_every_kind_of_file_is_used_or_skipped_with_its_reason(wan: Path, tmp_path: Path) -> None:
    data = clips(tmp_path / "data", 2)
    clips(data / "short", 1, frames=3)
    pictures(data / "odd ünïcode, 'name", 1)
    (data / "broken.mp4").write_bytes(b"no video")
    (data / "broken.txt").write_text("a text")
    (data / "silent.mp4").write_bytes((data / "v0.mp4").read_bytes())
    (data / "notes.md").touch()
    done = encoded(wan, data, tmp_path / "out", CLIPS)
    assert done.found == done.encoded + done.stored + len(done.skipped) == 7
    assert done.encoded == 2
    rows = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    reasons = {Path(row["file"]).name: row["reason"] for row in rows}
    assert {name: text.split(":")[0] for name, text in reasons.items()} == {
        "notes.md": "files with the suffix .md are not used",
        "silent.mp4": "no caption",
        "p0.png": "is a picture, but the shortest clips have 5 frames",
        "v0.mp4": "has 3 frames, but the shortest bucket has 5",
        "broken.mp4": reasons["broken.mp4"].split(":")[0],
    }
    assert "cannot be decoded" in reasons["broken.mp4"]
    with pytest.raises(MediaError, match=r"silent\.mp4: no caption"):
        encoded(wan, data, tmp_path / "strict", {**CLIPS, "on_bad": "error"})
    with pytest.raises(DataError, match="is a picture, but the shortest clips have 5 frames"):
        encoded(wan, pictures(tmp_path / "pictures", 1), tmp_path / "none", CLIPS)


def test_a_video_never_becomes_a_picture_silently(flux: Path, wan: Path, tmp_path: Path) -> None:
    data = clips(tmp_path / "data", 1, frames=3)
    with pytest.raises(DataError, match=r"v0\.mp4: is a video, but flux trains on pictures"):
        encoded(flux, data, tmp_path / "flux", PICTURES)
    pictures(data, 1)
    done = encoded(wan, data, tmp_path / "mixed", {**CLIPS, "frames": [1, 5], "max_upscale": 3})
    assert [one.file.name for one in done.skipped] == ["v0.mp4"]
    assert [row.id for row in LatentCache(tmp_path / "mixed").rows] == ["p0.png"]
    data = clips(tmp_path / "frames", 1, frames=3)
    assert encoded(wan, data, tmp_path / "first", {**CLIPS, "frames": 1}).encoded == 1  # asked for


def test_all_clips_of_a_video_are_cut_and_it_is_hashed_once(wan: Path, tmp_path: Path, monkeypatch: Any) -> None:
    data = clips(tmp_path / "data", 1, frames=17)
    read: list[Path] = []
    monkeypatch.setattr(loading, "open_regular", lambda file: read.append(file) or open_regular(file))
    done = encoded(wan, data, tmp_path / "out", {**CLIPS, "clips": "all"})
    assert done.encoded == 3
    assert read.count(data / "v0.mp4") == 1
    assert len({row.source_hash for row in LatentCache(tmp_path / "out").rows}) == 1


def test_output_in_the_data_and_old_contact_sheets_are_no_data(flux: Path, tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", 2)
    for output in (data, data / "cache"):
        with pytest.raises(DataError, match=r"is the data folder .* or lies in it: choose a folder outside"):
            encoded(flux, data, output, PICTURES)
    (data / "rows.csv").write_text("file,caption\np0.png,a cat\n")
    encoded(flux, data / "rows.csv", data / "cache", {**PICTURES, "sheet": 1})
    done = encoded(flux, data, tmp_path / "out", {**PICTURES, "captions": "optional"})
    assert {row.id for row in LatentCache(tmp_path / "out").rows} == {"p0.png", "p1.png"}
    assert "is the contact sheet of a latent cache" in str(done.skipped)


def test_a_file_that_vanishes_or_changes_during_the_run_is_skipped(
    flux: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    data = pictures(tmp_path / "data", 4)
    real = loading.load_media

    def slow(source: Any, *args: Any, **kwargs: Any) -> Any:
        if source.id == "p0.png":
            (data / "p3.png").unlink(missing_ok=True)
            time.sleep(0.05)
        media = real(source, *args, **kwargs)
        if source.id == "p1.png":
            Image.fromarray(pixels(50, 48, 32)).save(data / "p1.png")
        return media

    monkeypatch.setattr(loading, "load_media", slow)
    done = encoded(flux, data, tmp_path / "out", {**PICTURES, "workers": 1})
    reasons = {one.file.name: one.reason for one in done.skipped}
    assert reasons["p1.png"].endswith("changed while it was read")
    assert "No such file" in reasons["p3.png"]
    assert (done.found, done.encoded) == (4, 2)


def test_a_full_disk_is_one_clear_error_and_the_next_run_continues(
    flux: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    data, out, plain = pictures(tmp_path / "data"), tmp_path / "out", tmp_path / "plain"
    encoded(flux, data, plain, PICTURES)
    from lightning_cp.finetune.latent_cache import store as files

    flush, written = files.flush, []

    def fails(path: Path) -> None:
        written.append(path)
        if len(written) == 10:  # the index, six texts, and two pictures are written
            raise OSError(28, "No space left on device")
        flush(path)

    monkeypatch.setattr(files, "flush", fails)
    with pytest.raises(CacheError, match=r"media/\w\w/\w+\.safetensors .* No space left on device.*free some space"):
        encoded(flux, data, out, PICTURES)
    monkeypatch.setattr(files, "flush", flush)
    done = encoded(flux, data, out, PICTURES)
    assert (done.encoded, done.stored, done.encoded_captions) == (5, 2, 0)
    assert contents(out) == contents(plain)


@pytest.mark.parametrize("case", ["cogvideox", *KINDS])
@pytest.mark.default(1)
def test_the_contact_sheet_of_every_family_shows_what_was_encoded(case: str, tmp_path: Path) -> None:
    frames, height, width = CASES[case].size
    data = clips(tmp_path / "data", 1, frames) if frames > 1 else pictures(tmp_path / "data", 1)
    file = next(path for path in sorted(data.iterdir()) if path.suffix != ".txt")
    row = {"file": file.name, "caption": "x"}
    if CASES[case].reference:
        row["reference"] = file.name
    (data / "rows.jsonl").write_text(json.dumps(row))
    settings = {"sizes": [[height, width]], "frames": frames, "dtype": torch.float32, "max_upscale": 60, "sheet": 0}
    if frames > 1:
        settings["fps"] = 24.0
    encoded(pipeline(tmp_path / "pipe", case), data / "rows.jsonl", tmp_path / "out", settings)
    cache = LatentCache(tmp_path / "out")
    decode = partial(family_for(made(case)).decode, made(case).vae)
    draw_contact_sheet(decode, cache, tmp_path / "sheet.png", 4)
    decoded = decode(cache.sample(0)["latents"][None])
    middle = decoded[0] if decoded.dim() == 4 else decoded[0, :, decoded.shape[2] // 2]
    with Image.open(tmp_path / "sheet.png") as sheet:
        shown = torch.tensor(list(sheet.convert("RGB").tobytes())).view(sheet.height, sheet.width, 3) / 255
    scale = 192 / max(height, width)
    expected = middle.mean(dim=(1, 2))
    part = shown[: round(height * scale), : round(width * scale)].mean(dim=(0, 1))
    assert (part - expected).abs().max() < 0.05
    assert middle.shape[1:] == (height, width)


def test_one_picture_or_none(flux: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no usable file"):
        encoded(flux, tmp_path / "empty", tmp_path / "out", PICTURES)
    assert not (tmp_path / "out").exists()
    assert encoded(flux, pictures(tmp_path / "one", 1), tmp_path / "out", PICTURES).encoded == 1
    (tmp_path / "one" / "p0.txt").write_bytes("Käse".encode("latin-1"))
    with pytest.raises(DataError, match=r"p0\.txt is not UTF-8 text .* save it with the encoding UTF-8"):
        encoded(flux, tmp_path / "one", tmp_path / "new", PICTURES)
    with pytest.raises(FamilyError, match="height=10 must be a multiple of 4"):
        encoded(flux, pictures(tmp_path / "two", 1), tmp_path / "new", {**PICTURES, "sizes": [[10, 16]]})
    assert not (tmp_path / "new").exists()
