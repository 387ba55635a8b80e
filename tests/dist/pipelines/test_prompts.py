"""Prompts over data groups: negative prompts, prompts of one call, results that are not one a prompt, files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from lightning_cp.errors import CallFailedError
from lightning_cp.pipelines import read_prompts, sample_prompts, sampling_ranks
from lightning_cp.pipelines.error_votes import Votes
from tests.harness import RankPool
from tests.pipelines import PIPES
from tests.pipelines.tiny import error_of

TEXTS = ["a cat", "a very slow dog", "two birds", "rain"]


def _pipe(name: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline, and the inputs of its call without the prompt."""
    return PIPES[name].pipe(), {key: x for key, x in PIPES[name].inputs().items() if key != "prompt"}


def _with_a_negative(rank: int, world: int, name: str, per_call: int) -> list[float]:
    """The relative error of each sample, against one process with a list."""
    pipe, inputs = _pipe(name)
    del inputs["negative_prompt"]
    alone = []
    for i, text in enumerate(TEXTS):
        seeded = [torch.Generator().manual_seed(3 + i)]
        alone.append(pipe([text], negative_prompt=["blurry"], generator=seeded, **inputs)[0][0])
    parallelize_pipeline(pipe, ContextParallelConfig())
    found = sample_prompts(pipe, TEXTS, seed=3, per_call=per_call, negative_prompt="blurry", **inputs)
    return [error_of(y, x) for x, y in zip(found, alone, strict=True)]


@pytest.mark.parametrize(("name", "per_call"), [("hunyuan_dit", 2), ("stable_audio", 1)])
def test_one_negative_prompt_is_for_all_prompts(run_ranks: RankPool, name: str, per_call: int) -> None:
    for errors in run_ranks(3, _with_a_negative, name, per_call):
        assert max(errors) < 1e-4


def _not_one_a_prompt(rank: int, world: int) -> tuple[str, list[int]]:
    pipe, inputs = _pipe("framepack")
    parallelize_pipeline(pipe, ContextParallelConfig())
    written: list[int] = []
    with pytest.raises(ValueError, match="for 1 prompts") as told:
        sample_prompts(pipe, TEXTS[:world], write=lambda i, _: written.append(i), **inputs)
    return str(told.value), written


def test_a_result_that_is_not_one_a_prompt_is_refused_on_every_rank(run_ranks: RankPool) -> None:
    for told, written in run_ranks(3, _not_one_a_prompt):
        assert told.startswith(
            "HunyuanVideoFramepackPipeline returned 2 frames for 1 prompts, not one per prompt: use another"
        )
        assert written == []


def _full_disk(rank: int, world: int, ring: int) -> tuple[str, list[int]]:
    pipe, inputs = _pipe("flux")
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=ring))
    written: list[int] = []

    def write(number: int, sample: Any) -> None:
        if number == 1:
            raise OSError("no space left")
        written.append(number)

    with pytest.raises((OSError, CallFailedError)) as told:
        sample_prompts(pipe, ["a cat", "a dog", "two birds", "rain"], write=write, **inputs)
    assert len(sample_prompts(pipe, ["a cat"], **inputs)) == 1, "the next call fails"
    return f"{type(told.value).__name__}: {told.value}", written


@pytest.mark.parametrize(("world", "ring"), [(3, 3), (4, 2)])
@pytest.mark.default(1)
def test_a_rank_that_cannot_write_ends_all_ranks_with_its_error(run_ranks: RankPool, world: int, ring: int) -> None:
    found = run_ranks(world, _full_disk, ring, timeout_s=240)
    assert found[0] == ("OSError: no space left", [0])
    assert found[1][0] == "CallFailedError: rank 0 failed in this call of FluxPipeline: OSError: no space left"
    if ring < world:
        assert found[2] == ("CallFailedError: rank 0 failed in sample_prompts: OSError: no space left", [2, 3])


def _sung(rank: int, world: int, per_call: int) -> list[float]:
    pipe, inputs = _pipe("ace_step")
    del inputs["lyrics"]
    prompts, lyrics = ["A cat sings.", "A dog sings."], ["Soft notes", "Loud notes"]

    def in_one_process(lyrics: list[str]) -> Tensor:  # in the same batches: this pipeline pads texts to the longest
        seeded = [torch.Generator().manual_seed(i) for i in range(2)]
        starts = range(0, 2, per_call)
        parts = [(prompts[i : i + per_call], lyrics[i : i + per_call], seeded[i : i + per_call]) for i in starts]
        return torch.cat([pipe(x, lyrics=y, generator=z, **inputs)[0] for x, y, z in parts])

    alone, silent = in_one_process(lyrics), in_one_process(["", ""])
    parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
    with pytest.raises((ValueError, CallFailedError), match="one for each of 2"):
        sample_prompts(pipe, prompts, lyrics=lyrics[:1], **inputs)
    found = [sample_prompts(pipe, prompts, per_call=per_call, lyrics=lyrics, **inputs)]
    found += [sample_prompts(pipe, prompts, per_call=per_call, **inputs)]
    assert error_of(alone, silent) > 1e-3, "the lyrics change nothing"
    return [error_of(y, torch.stack(x)) for x, y in zip(found, (alone, silent))]


@pytest.mark.parametrize("per_call", [2, 1])
@pytest.mark.default(1)
def test_lyrics_are_given_to_each_prompt(run_ranks: RankPool, per_call: int) -> None:
    for errors in run_ranks(3, _sung, per_call, timeout_s=240):
        assert max(errors) < 1e-4


class Halves:
    """A pipeline that takes much, and gives one sample for two prompts."""

    def __call__(
        self,
        prompt: list[str],
        generator: Any,
        image: Any = None,
        last_image: Any = None,
        mask_image: Any = None,
        control_video: Any = None,
        conditions: Any = None,
        hint: Any = None,
        prompt_attention_mask: Any = None,
        video_length: int = 1,
        return_dict: bool = True,
    ) -> Any:
        samples = prompt[: len(prompt) // 2]
        return {"images": samples} if return_dict else (samples,)


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"image": Image.new("RGB", (2, 2))}, "per_call=2 is not valid with image, .*: use per_call=1"),
        ({"last_image": torch.zeros(3, 2, 2)}, "per_call=2 is not valid with last_image"),
        ({"mask_image": [Image.new("L", (2, 2))]}, "per_call=2 is not valid with mask_image"),
        ({"control_video": [torch.zeros(3, 2, 2)]}, "per_call=2 is not valid with control_video"),
        ({"conditions": object()}, "per_call=2 is not valid with conditions"),
        ({"hint": Image.new("RGB", (2, 2))}, "per_call=2 is not valid with hint"),
        ({"prompt_attention_mask": torch.ones(2, 9)}, "Halves returned 1 images for 2 prompts, .*: use per_call=1"),
        ({"video_length": 9, "image": None}, "Halves returned 1 images for 2 prompts"),
        ({"return_dict": False}, "Halves returned 1 entries for 2 prompts"),
    ],
)
def test_several_prompts_a_call_that_a_pipeline_does_not_keep_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any], told: str
) -> None:
    ranks, votes = sampling_ranks(ContextParallelConfig()), Votes("Halves", None)
    installed = SimpleNamespace(ranks=ranks, settings=SimpleNamespace(stages="together"), votes=votes)
    monkeypatch.setattr("lightning_cp.pipelines.prompts.parallel_state", lambda pipe: installed)
    with pytest.raises(ValueError, match=told):
        sample_prompts(Halves(), ["a", "b"], per_call=2, **inputs)


def test_the_mark_at_the_start_of_a_file_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\nä\n", encoding="utf-8-sig")
    assert read_prompts(tmp_path / "prompts.txt") == ["a cat", "ä"]


def test_a_long_text_is_no_file() -> None:
    with pytest.raises(ValueError, match="is not a file: must be a list of texts"):
        read_prompts("cat" * 200)
