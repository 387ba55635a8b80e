"""Written values are read back bit for bit, in workers too; wrong use is refused."""

from __future__ import annotations

import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cp.errors import CacheError
from lightning_cp.finetune.latent_cache import CacheWriter, LatentCache, LatentData, caption_hash, prepare_cache
from tests.unit.finetune.latent_cache.made import CAPTIONS, add, bits, check, index, make, media, row, text, write


@pytest.mark.parametrize("ranks", [1, 3])
def test_samples_come_back_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    made = make(tmp_path / "new" / "cache", 8, ranks)
    check(made, 8)
    assert made.family().text.form == "masked"
    assert bits(made.empty_text) == bits(text(""))
    files = [path for path in made.folder.rglob("*") if path.is_file()]
    assert len(files) == 2 + 8 + 7
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {stat.S_IMODE(made.folder.stat().st_mode) & 0o666}


def test_a_run_continues_with_any_number_of_ranks(tmp_path: Path) -> None:
    make(tmp_path, 3, ranks=2)
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    check(make(tmp_path, 9, ranks=4), 9)
    assert {path: path.stat().st_mtime_ns for path in first} == first
    check(make(tmp_path, 9), 9)


def test_writers_see_at_once_what_others_have_stored(tmp_path: Path) -> None:
    """Two runs on one folder need no lock: each takes over what the other has stored, and both complete it."""
    write(tmp_path, [0, 1])
    second = write(tmp_path, [])
    first = write(tmp_path, range(4))
    add(second, range(5))
    assert [second.take_media({"id": row(i).id, "source_hash": "other"}) for i in range(5)] == [False] * 5
    first.finish()
    check(LatentCache(tmp_path), 4)
    second.finish()
    check(LatentCache(tmp_path), 5)


def test_texts_that_depend_on_media(tmp_path: Path) -> None:
    ours = [caption_hash("a cat", name) for name in ("sample-0000", "sample-0001")]
    assert len({*ours, caption_hash("a cat"), caption_hash('["a cat", "sample-0000"]')}) == 4
    writer = write(tmp_path, [], [""])
    for i in range(2):
        assert writer.add_text("a cat", text(CAPTIONS[i]), media_id=row(i).id) == ours[i]
        writer.add_media(row(i, captions=(ours[i],)), media(i))
    writer.finish()
    assert [len(LatentCache(tmp_path).sample(i)["prompt_embeds"]) for i in range(2)] == [1, 2]


def test_changing_a_sample_does_not_change_the_cache(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.sample(2)["latents"].fill_(7)
    check(made, 8)


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"height": 0}, {}, "height=0 must be a whole number from 1"),
        ({"captions": ()}, {}, r"captions=\[\] must be a list of one or more, each a text"),
        ({"fps": float("nan")}, {}, "fps=nan must be null or a number more than 0"),
        ({"weight": 0}, {}, "weight=0 must be a number more than 0"),
        ({"repeats": 0}, {}, "repeats=0 must be a whole number from 1 to 10000"),
        ({"use": "test"}, {}, "use='test' must be one of train, prior, validation"),
        ({"tokens": torch.tensor(3)}, {}, "cannot be stored: Object of type Tensor is not JSON"),
        ({}, {"latents": None}, "latents is NoneType: must be a dense tensor"),
        ({}, {"latents": torch.zeros(2, dtype=torch.complex64)}, "latents is torch.complex64 torch.strided on cpu"),
        ({}, {"latents": torch.zeros(2, device="meta")}, "on meta: must be a dense tensor"),
    ],
)
def test_invalid_samples_are_refused_and_the_writer_goes_on(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    writer = write(tmp_path, [0])
    with pytest.raises(CacheError, match=message):
        writer.add_media(row(1, **changes), {**media(1), **tensors})
    add(writer, [1])
    writer.finish()
    check(LatentCache(tmp_path), 2)


def test_what_is_not_finished_cannot_be_read(tmp_path: Path) -> None:
    for reader in (LatentCache, CacheWriter):
        with pytest.raises(CacheError, match=r"is not a latent cache: it has no index.json. Make one with"):
            reader(tmp_path / "nothing")
    writer = write(tmp_path, range(3), CAPTIONS[1:])
    with pytest.raises(CacheError, match=r"3 samples and 6 texts. Run precompute again to continue"):
        LatentCache(tmp_path)
    with pytest.raises(CacheError, match=f"cannot be completed: it has no text {caption_hash('')}, the empty caption"):
        writer.finish()
    check(make(tmp_path, 3), 3)
    prepare_cache(tmp_path, index())  # a run that continues a complete cache and is stopped
    with pytest.raises(CacheError, match=r"is not complete: it has 3 samples and 7 texts. Run precompute again"):
        LatentCache(tmp_path)
    check(make(tmp_path, 3), 3)


@pytest.mark.parametrize(
    ("samples", "captions", "message"),
    [
        ([0], ["", CAPTIONS[1]], f"has no text {caption_hash(CAPTIONS[2])}, a caption of sample 'sample-0000"),
        ([0, 0], CAPTIONS, "the sample 'sample-0000' is listed twice"),
        ([], CAPTIONS, "it has no samples: add some"),
    ],
)
def test_what_is_missing_or_double_is_noticed_at_the_end(
    tmp_path: Path, samples: list[int], captions: list[str], message: str
) -> None:
    writer = write(tmp_path, samples, captions)
    with pytest.raises(CacheError, match=message):
        writer.finish()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (media(2) | {"latents": media(1)["latents"]}, "'sample-0002' has the tensors bfloat16 .*, but the media"),
        (media(2) | {"other": torch.zeros(2)}, r"has the tensors \{.*'other'.*\}, but the media 'sample-0000' has"),
        (media(2) | {"latents": torch.zeros(2)}, "'latents': 'float32'.*but the media 'sample-0000' has.*bfloat16"),
    ],
)
def test_tensors_that_cannot_be_in_one_batch_are_noticed(tmp_path: Path, tensors: Any, message: str) -> None:
    writer = write(tmp_path, [0])
    writer.add_media(row(2), tensors)
    with pytest.raises(CacheError, match=message):
        writer.finish()


def test_facts_must_be_plain(tmp_path: Path) -> None:
    for value in ((1, 2), float("inf"), torch.tensor(1), {1: 2}):
        with pytest.raises(CacheError, match="must consist of dicts with string keys"):
            prepare_cache(tmp_path / "x", index(facts={"pixels": value}))
    check(make(tmp_path / "x"), 8)


def data_of(folder: Path) -> LatentData:
    return LatentData(make(folder, 8), seed=5, repeats=3)


def test_items_repeat_and_captions_change_with_the_epoch(tmp_path: Path) -> None:
    data = data_of(tmp_path)
    assert len(data) == len(data.buckets) == 3 * 9
    assert data.buckets[:4] == [(1, 32, 64)] * 3 + [(1, 64, 64)]
    assert data.buckets[-1] == (1, 64, 64)
    assert bits(data[4]) == bits(data[(4, 0)]) == bits(LatentData(data.cache, seed=5, repeats=3)[4])
    for item, number in ((0, 0), (2, 0), (3, 1), (9, 3), (14, 3), (15, 4), (26, 7), (-1, 7)):
        seen = [bits(data[(item, epoch)]) for epoch in range(12)]
        choices = [bits(data.cache.sample(number, caption=k)) for k in range(2)]
        assert {choices.index(one) for one in seen} == {0, 1}
    drawn = [[len(data[(i, epoch)]["prompt_embeds"]) for i in range(27)] for epoch in range(3)]
    assert len(set(map(tuple, drawn))) == 3
    with pytest.raises(IndexError, match="item 27 is out of range"):
        data[27]
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        LatentData(data.cache, repeats=0)


def batches(data: LatentData, **options: Any) -> list[dict[str, Any]]:
    order = [[(i, epoch) for i in (0, 1, 2, 6)] for epoch in range(3)]
    loader = DataLoader(data, batch_sampler=order, collate_fn=data.collate, **options)
    return [bits({**batch.tensors, **{f"empty_{name}": x for name, x in batch.empty.items()}}) for batch in loader]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.default(1)
def test_workers_read_the_same(tmp_path: Path, method: str) -> None:
    data = data_of(tmp_path)
    here = batches(data)
    assert {"latents", "latents_std", "prompt_embeds", "prompt_mask", "empty_prompt_embeds"} <= here[0].keys()
    assert batches(data, num_workers=1 + (method == "fork"), multiprocessing_context=method) == here


def test_a_cache_is_pickled_without_tensors(tmp_path: Path) -> None:
    content = pickle.dumps(make(tmp_path))
    assert len(content) < 20_000
    check(pickle.loads(content), 8)
