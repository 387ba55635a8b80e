"""Prompts of samples during training: a list or a file, with settings of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_cp.finetune.prompt_list import SamplePrompt, have_equal_work, sample_prompts_of

ENTRIES = [
    "a red fox",
    {"prompt": "a blue bird", "seed": 3, "image": "a.png", "height": 64, "negative_prompt": "blurry"},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.png").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["prompts.json", "prompts.yaml", None])
def test_entries_are_texts_or_settings(folder: Path, name: str | None) -> None:
    prompts: Any = ENTRIES
    if name is not None:
        (folder / "other").mkdir()
        prompts = folder / "other" / name
        prompts.write_text(json.dumps(ENTRIES))
        (folder / "a.png").rename(folder / "other/a.png")
    first, second = sample_prompts_of(prompts)
    assert first == SamplePrompt("a red fox")
    path = Path("a.png") if name is None else folder / "other/a.png"
    assert second == SamplePrompt("a blue bird", 3, path, {"height": 64, "negative_prompt": "blurry"})
    assert second.text == "a blue bird (seed 3, image a.png, height 64, negative_prompt blurry)"


def test_a_text_file_has_a_prompt_on_each_line(folder: Path) -> None:
    (folder / "prompts.txt").write_text("\ufeffa red fox: 1\n\n  a blue bird\n", encoding="utf-8")
    assert sample_prompts_of("prompts.txt") == [SamplePrompt("a red fox: 1"), SamplePrompt("a blue bird")]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], r"prompts=\[\] is not valid: must be a list such as"),
        (7, "prompts=7 is not valid: must be a list"),
        ("none.txt", "prompts=none.txt is not valid, because it does not exist"),
        ([7], "entry 1 is 7: must be a text, or settings"),
        (["a", {"seed": 1}], "entry 2 has prompt=None: must be a text"),
        ([{"prompt": "a", "seed": -1}], "entry 1 has seed=-1: must be a whole number"),
        ([{"prompt": "a", "image": "no.png"}], "entry 1 has image=no.png, which does not exist: must be a picture"),
        ([{"prompt": "a", "generator": 1}], "entry 1 has generator, which is set for each sample"),
    ],
)
def test_what_is_not_valid_is_named(folder: Path, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_prompts_of(prompts)


@pytest.mark.parametrize("text", ["a: [", "!!python/object:os.system x", "a: 1", "[]"])
def test_a_file_that_is_no_list_is_refused(folder: Path, text: str) -> None:
    (folder / "prompts.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^sampling\.prompts=prompts\.yaml (cannot be read|is not valid)"):
        sample_prompts_of("prompts.yaml", setting="sampling.prompts")


@pytest.mark.parametrize(
    ("second", "equal"),
    [
        ({"seed": 3, "height": 64}, True),
        ({"num_inference_steps": 3}, False),
        ({"negative_prompt": "a"}, False),
        ({"guidance_scale": 1.0}, False),
    ],
)
def test_prompts_with_another_number_of_forwards_are_found(second: dict[str, Any], equal: bool) -> None:
    assert have_equal_work(sample_prompts_of(["a", {"prompt": "b", **second}])) is equal
    assert have_equal_work(sample_prompts_of([{"prompt": x, "negative_prompt": x} for x in "ab"]))
