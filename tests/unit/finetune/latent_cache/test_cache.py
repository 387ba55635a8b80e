"""Written values are read back bit for bit, in workers too; wrong use is refused."""

from __future__ import annotations

import json
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cp.errors import CacheError
from lightning_cp.finetune.latent_cache import CacheWriter, LatentCache, LatentData, cache, caption_hash, prepare_cache
from tests.unit.finetune.latent_cache.made import CAPTIONS, add, bits, check, index, make, media, row, text


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("shard_bytes", [1, 300, 1 << 20])
def test_samples_come_back_bit_for_bit(tmp_path: Path, ranks: int, shard_bytes: int) -> None:
    made = make(tmp_path / "new" / "cache", 8, ranks, shard_bytes)
    check(made, 8)
    assert made.family().text.form == "masked"
    assert bits(made.empty_text) == bits(text(""))
    shards = len({one.shard for one in made.rows})
    assert shards == {1: 8, 1 << 20: ranks}.get(shard_bytes, shards)
    assert shards > ranks or shard_bytes == 1 << 20
    modes = {stat.S_IMODE(path.stat().st_mode) for path in made.folder.iterdir()}
    assert modes == {stat.S_IMODE(made.folder.stat().st_mode) & 0o666}


def test_a_run_continues_with_any_number_of_ranks(tmp_path: Path) -> None:
    make(tmp_path, 3, ranks=2)
    first = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    check(make(tmp_path, 9, ranks=4), 9)
    assert all((tmp_path / name).read_bytes() == content for name, content in first.items())
    check(make(tmp_path, 9), 9)


def test_all_ranks_see_what_was_stored_before_the_run(tmp_path: Path) -> None:
    make(tmp_path, 3)
    with prepare_cache(tmp_path, index()):
        with CacheWriter(tmp_path, rank=0) as fast:
            add(fast, [5])
        with CacheWriter(tmp_path, rank=1) as slow:
            assert sorted(slow.done_ids()) == [row(i).id for i in range(3)]
            assert slow.done_texts() == {caption_hash(caption) for caption in CAPTIONS}
        with CacheWriter(tmp_path, rank=0) as again:
            assert again.done_ids()[row(5).id].source_hash == "5"


def test_texts_that_depend_on_media(tmp_path: Path) -> None:
    ours = [caption_hash("a cat", name) for name in ("sample-0000", "sample-0001")]
    assert len({*ours, caption_hash("a cat"), caption_hash('["a cat", "sample-0000"]')}) == 4
    with prepare_cache(tmp_path, index()) as prepared, CacheWriter(tmp_path) as writer:
        add(writer, [], [""])
        for i in range(2):
            assert writer.add_text("a cat", text(CAPTIONS[i]), media_id=row(i).id) == ours[i]
            writer.add_media(row(i, captions=(ours[i],)), media(i))
        writer.close()
        prepared.finish()
    assert [len(LatentCache(tmp_path).sample(i)["prompt_embeds"]) for i in range(2)] == [1, 2]


def test_changing_a_sample_does_not_change_the_cache(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.sample(2)["latents"].fill_(7)
    check(made, 8)
    mine = media(0)
    with prepare_cache(tmp_path, index()) as prepared, CacheWriter(tmp_path) as writer:
        writer.add_media(row(8), media(8) | {"latents": (given := media(8)["latents"].clone())})
        given.fill_(3)
        writer.close()
        prepared.finish()
    assert bits(media(0)) == bits(mine)
    check(LatentCache(tmp_path), 9)


def test_few_shards_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST_OPEN", 2)
    made = make(tmp_path, shard_bytes=1)
    check(made, 8)
    assert len(made._maps._opened) == 2


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"id": "sample-0000"}, {}, "'sample-0000' is stored already: skip the ids in done_ids"),
        ({"height": 0}, {}, "height=0 must be an integer of at least 1"),
        ({"captions": ()}, {}, r"captions=\[\] must be one or more caption hashes"),
        ({"captions": ("a cat",)}, {}, "captions=.'a cat'. must be one or more caption hashes"),
        ({"fps": float("nan")}, {}, "fps=nan must be a positive number or None"),
        ({"weight": 0}, {}, "weight=0 must be a positive number"),
        ({"use": "test"}, {}, "use='test' must be one of train, prior, validation"),
        ({"tokens": torch.tensor(3)}, {}, "cannot be stored: Object of type Tensor is not JSON"),
        ({}, {"latents": None}, "latents is NoneType: must be a dense tensor"),
        ({}, {"latents": torch.zeros(2, dtype=torch.complex64)}, "latents is torch.complex64 torch.strided on cpu"),
        ({}, {"latents": torch.zeros(2, device="meta")}, "on meta: must be a dense tensor"),
        ({}, {"a/b": torch.zeros(2)}, "the tensor name 'a/b' must consist of letters, digits and _"),
        ({}, {"other": torch.zeros(2)}, r"has the tensors \{.*'other'.*\}, but earlier ones have"),
        ({}, {"latents": torch.zeros(2)}, "'latents': 'torch.float32'.*but earlier ones have.*bfloat16"),
    ],
)
def test_invalid_samples_are_refused_and_the_writer_goes_on(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    with prepare_cache(tmp_path, index()) as prepared:
        with CacheWriter(tmp_path) as writer:
            add(writer, [0])
            with pytest.raises(CacheError, match=message):
                writer.add_media(row(1, **changes), {**media(1), **tensors})
            with pytest.raises(CacheError, match=r"'caption 0 .*' is stored already"):
                writer.add_text(CAPTIONS[1], text(CAPTIONS[1]))
            add(writer, [1])
        prepared.finish()
    check(LatentCache(tmp_path), 2)


def test_what_is_not_finished_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"is not a latent cache: it has no index.json. Make one with"):
        LatentCache(tmp_path / "nothing")
    with prepare_cache(tmp_path, index(planned_samples=9)) as prepared:
        with CacheWriter(tmp_path) as writer:
            add(writer, range(3), CAPTIONS[1:])
        with pytest.raises(CacheError, match=r"3 of 9 samples and 6 texts; process \d+ on host .* writes it, or was"):
            LatentCache(tmp_path)
        with pytest.raises(CacheError, match="has no text of the empty caption"):
            prepared.finish()
    with pytest.raises(CacheError, match=r"3 of 9 samples and 6 texts. Run precompute again to continue"):
        LatentCache(tmp_path)
    with pytest.raises(CacheError, match="is not prepared: call prepare_cache on rank 0"):
        CacheWriter(tmp_path)
    check(make(tmp_path, 3), 3)
    with prepare_cache(tmp_path, index()):
        pass  # a run that continues a complete cache and is stopped
    with pytest.raises(CacheError, match=r"is not complete: it has 3 samples and 7 texts. Run precompute again"):
        LatentCache(tmp_path)
    check(make(tmp_path, 3), 3)


def test_missing_and_double_captions_and_ids_are_noticed_at_the_end(tmp_path: Path) -> None:
    with prepare_cache(tmp_path / "a", index()) as prepared:
        with CacheWriter(tmp_path / "a") as writer:
            add(writer, [0], ["", CAPTIONS[1]])
        with pytest.raises(
            CacheError, match=f"has no text {caption_hash(CAPTIONS[2])}, a caption of sample 'sample-0000"
        ):
            prepared.finish()
    with prepare_cache(tmp_path / "b", index()) as prepared:
        for rank in range(2):
            with CacheWriter(tmp_path / "b", rank=rank) as writer:
                add(writer, [0], CAPTIONS[rank::2])
        with pytest.raises(
            CacheError, match=r"'sample-0000' is stored twice, in .*rows-00000-media.jsonl and .*rows-00001"
        ):
            prepared.finish()
    with (
        prepare_cache(tmp_path / "d", index()) as prepared,
        pytest.raises(CacheError, match="has no samples: add some"),
    ):
        prepared.finish()
    with prepare_cache(tmp_path / "c", index()) as prepared:
        with CacheWriter(tmp_path / "c") as writer:
            add(writer, [0])
            writer.add_media(row(2), media(2) | {"latents": media(1)["latents"]})
        with pytest.raises(CacheError, match=r"latents of sample 1 have shape .*of \(1, 32, 64\)"):
            prepared.finish()


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
def test_workers_read_the_same(tmp_path: Path, method: str) -> None:
    data = data_of(tmp_path)
    here = batches(data)  # forked workers then inherit open maps
    assert {"latents", "latents_std", "prompt_embeds", "prompt_mask", "empty_prompt_embeds"} <= here[0].keys()
    assert batches(data, num_workers=1 + (method == "fork"), multiprocessing_context=method) == here


def test_a_pickled_cache_opens_its_maps_again(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.sample(0)
    content = pickle.dumps(made)
    assert len(content) < 20_000
    check(pickle.loads(content), 8)


def test_rows_files_are_json_lines(tmp_path: Path) -> None:
    make(tmp_path, shard_bytes=1 << 20)
    lines = [json.loads(line) for line in (tmp_path / "rows-00000-media.jsonl").read_text().splitlines()]
    assert [line.get("id") for line in lines] == [*(row(i).id for i in range(8)), None]
    assert lines[3]["source"] == "clips/3.mp4"
    assert lines[-1]["rows"] == 8
