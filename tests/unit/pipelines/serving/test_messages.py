"""Messages to other ranks hold plain data only, arrive as they were sent, and run no code."""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_output import FluxPipelineOutput
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_output import LTX2PipelineOutput
from diffusers.utils import BaseOutput
from PIL import Image

from lightning_cp.errors import CallFailedError
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.serving.messages import Messages, from_bytes, to_bytes


def _arrived(value: Any) -> Any:
    return from_bytes(to_bytes(value))


def test_plain_data_arrives_as_it_was_sent() -> None:
    text = [b"", b"\0\xff", "a cat \ud800", Path("a"), torch.bfloat16]
    plain = {"prompt": [None, True, 7, 1 << 80, -0.0, float("inf"), 2 - 1j, *text], 3: (8, 1.5, [True]), (1, "a"): {}}
    assert repr(_arrived(plain)) == repr(plain), "types and signs, too"
    conjugate, weight = torch.randn(2, 3, dtype=torch.complex64).conj().T, torch.nn.Parameter(torch.ones(2))
    tensors = [torch.arange(3.0), torch.ones(2, 0), torch.tensor(5), conjugate, torch.ones(1).expand(3), weight]
    for one, other in zip(_arrived(tensors), tensors, strict=True):
        assert (type(one), one.dtype) == (type(other), other.dtype)
        assert torch.equal(one, other)
    small = [np.linspace(0, 1, 3), np.array(["a", "bc"]), np.ones((2, 0)), np.float32(0.1), np.datetime64("2020-01-01")]
    arrays = [*small, np.asfortranarray(np.eye(2)), np.asarray(Image.new("RGB", (2, 2)))]
    for one, other in zip(_arrived(arrays), arrays, strict=True):
        assert (type(one), one.dtype) == (type(other), other.dtype)
        assert np.array_equal(one, other)
    assert len(to_bytes(torch.zeros(10**6)[3:5])) < 10_000, "the part of a large tensor only"


def test_a_generator_in_several_places_arrives_as_one() -> None:
    generator, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    (found, (again, equal)) = _arrived([[generator, generator], [generator, other]])
    assert found[0] is found[1] is again
    assert equal is not again, "equal states, but another generator"
    for one in found:
        assert torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=generator))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "1", "P", "quantized", "I;16", "F", "CMYK"])
def test_images_of_all_modes_arrive(mode: str) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (5, 3, 4), dtype=np.uint8))
    if mode == "I;16":
        image = Image.new(mode, (3, 5), 9)
    else:
        image = image.quantize(8) if mode == "quantized" else image.convert("RGB").convert(mode)
    if mode == "P":
        image.info["transparency"] = 4
    (found,) = _arrived([image])
    assert (found.mode, found.size, found.tobytes()) == (image.mode, image.size, image.tobytes())
    if mode != "I;16":
        assert found.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_dataclasses_of_diffusers_arrive_as_their_class() -> None:
    image = Image.new("RGB", (3, 5), 9)
    found, other = _arrived([LTX2VideoCondition(frames=[image], index=4), LTX2VideoCondition(frames=torch.ones(2, 3))])
    assert (type(found), found.frames[0].tobytes()) == (LTX2VideoCondition, image.tobytes())
    assert (found.index, found.crf) == (4, None)
    assert torch.equal(other.frames, torch.ones(2, 3))
    output = _arrived(LTX2PipelineOutput(frames=[image], audio=torch.ones(2, 3)))
    assert (type(output), list(output)) == (LTX2PipelineOutput, ["frames", "audio"])
    assert output.frames[0].tobytes() == output["frames"][0].tobytes() == image.tobytes()
    assert _arrived(FluxPipelineOutput(images=None)).images is None


class Harmful:
    """What a request must not hold."""

    def __reduce__(self) -> Any:
        return print, ("run on another rank",)


@dataclass
class Own(BaseOutput):
    images: list[int]


def _nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Harmful(), "builtins.print"),
        ([1, {"b": lambda: 1}], "lambda"),
        (iter([1]), "builtins.iter"),
        (math.sqrt, "math.sqrt"),
        (np.array([Harmful()]), "builtins.print"),
        (type("Text", (str,), {"__reduce__": Harmful.__reduce__})("x"), "builtins.print"),
        ({Harmful: 1}, "test_messages.Harmful"),
        (Own(images=[1]), "test_messages.Own"),
        pytest.param(10**5000, "Unsupported operand", id="huge"),
        pytest.param(_nested(5000), "recursion", id="deep"),
    ],
)
def test_other_objects_are_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=rf"^sigmas cannot be sent to other ranks, only plain data can .*{named}"):
        to_bytes(value, "sigmas")


def _saved(value: Any) -> torch.Tensor:
    torch.save(value, file := io.BytesIO())
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def test_bytes_of_a_stranger_run_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    pickled = torch.frombuffer(bytearray(pickle.dumps(Harmful())), dtype=torch.uint8)
    for data in (_saved(Harmful()), pickled, to_bytes([1])[:40], torch.empty(0, dtype=torch.uint8)):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            from_bytes(data)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["[gloo/transport/tcp/pair.cc] Connection closed by peer", "another failure"])
def test_a_lost_rank_is_one_sentence_for_rank_zero_and_for_those_that_wait(text: str) -> None:
    kind = CallFailedError if "peer" in text else RuntimeError
    said = r"the connection to another rank broke .*: it has exited" if "peer" in text else text
    requests = Messages(mock.Mock(group_name="requests"))
    with mock.patch("lightning_cp.pipelines.serving.messages.dist.broadcast", side_effect=RuntimeError(text)):
        for exchange in (requests.send, requests.receive):
            with pytest.raises(kind, match=said) as caught:
                exchange()
            assert "gloo" not in str(caught.value)
    votes = Votes("Pipe", mock.Mock())
    with (
        mock.patch("lightning_cp.pipelines.error_votes.gather_in_background", side_effect=RuntimeError(text)),
        pytest.raises(kind, match=said),
        votes.call(),
    ):
        votes.check()
    with pytest.raises(RuntimeError, match=r"can make no further call, .*: end the job"):
        votes.check_usable()
