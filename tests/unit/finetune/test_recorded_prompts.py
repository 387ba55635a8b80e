"""Texts that were encoded together with pictures are found again by the contents of the pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lightning_cp.finetune.encoders import release
from lightning_cp.finetune.prompt_samples import RecordedPrompts
from lightning_cp.nest import tensors
from tests.e2e.finetuning import frames_of
from tests.pipelines import PIPES

CPU = torch.device("cpu")


class _EditPipe:
    """A pipeline with a text encoder that sees a picture, and a transformer that must not be called."""

    def __init__(self) -> None:
        self.components = {"text_encoder": nn.Linear(3, 2), "vae": nn.Linear(3, 3), "transformer": nn.Identity()}

    def encode_prompt(self, prompt: str, image: Any, device: torch.device) -> tuple[Tensor, int]:
        pixels = torch.tensor(np.asarray(image[0]), dtype=torch.float32, device=device).mean((0, 1))
        return self.components["text_encoder"](pixels), len(prompt)

    def __call__(self, prompt: str, image: Image.Image, **_: Any) -> Tensor:
        embeds, _length = self.encode_prompt(prompt, image=[image.resize((8, 4))], device=CPU)
        self.components["transformer"](embeds)
        raise AssertionError("the transformer must not be called")


def test_each_picture_has_its_own_text_and_an_unknown_one_is_an_error() -> None:
    pipe, text = _EditPipe(), RecordedPrompts()
    pictures = [Image.fromarray(frames_of(i, (1, 64, 96))[0]).resize((8, 4)) for i in range(3)]
    expected = [pipe.encode_prompt("a red fox", image=[x], device=CPU) for x in pictures]
    text.record(pipe, [{"prompt": "a red fox", "image": x} for x in pictures[:2]], CPU)
    pipe.components["text_encoder"] = nn.Linear(1, 1)  # freed
    text.replay_in(pipe, CPU)
    for picture, (embeds, length) in zip(pictures[:2], expected[:2], strict=True):
        found, found_length = pipe.encode_prompt("a red fox", image=[picture.copy()], device=CPU)
        assert torch.equal(found, embeds)
        assert found_length == length
    assert not torch.equal(expected[0][0], expected[1][0])
    with pytest.raises(ValueError, match="a prompt was not encoded"):
        pipe.encode_prompt("a red fox", image=[pictures[2]], device=CPU)


@pytest.mark.filterwarnings("ignore")
def test_what_a_pipeline_calls_with_the_text_is_recorded_in_its_place() -> None:
    """LTX-2 gives the states of all layers of its text encoder to `connectors`, which are far smaller."""
    pipe = PIPES["ltx2"].make()
    pipe.set_progress_bar_config(disable=True)
    calls = [{**PIPES["ltx2"].inputs(), "num_frames": 9, "prompt": text} for text in ("a cat", "a red fox")]
    for call in calls:
        del call["output_type"]

    def draw() -> list[Tensor]:
        seed = torch.Generator().manual_seed
        return [pipe(**call, generator=seed(0), output_type="latent").frames for call in calls]

    expected = draw()
    text = RecordedPrompts(("connectors",))
    text.record(pipe, calls, CPU)
    release(pipe, ("text_encoder", "tokenizer", "connectors"))
    text.replay_in(pipe, CPU)
    assert all(map(torch.equal, draw(), expected))
    assert not torch.equal(*expected)
    widths = {x.shape[-1] for x in tensors(text._results) if x.dim() == 3}
    assert widths == {1, 16}, "not the 48 of three layers"
    with pytest.raises(ValueError, match="a prompt was not encoded"):
        pipe(**{**calls[0], "prompt": "a dog"})
