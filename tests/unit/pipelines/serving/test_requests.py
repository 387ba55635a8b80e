"""Requests to other ranks hold plain data only, and arrive as they were sent."""

from __future__ import annotations

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
from lightning_cp.pipelines.serving.plain_data import PlainData
from lightning_cp.pipelines.serving.requests import Requests, from_bytes, to_bytes

CPU = torch.device("cpu")


def _arrived(*nests: Any) -> list[Any]:
    fields, arguments = from_bytes(to_bytes({"name": "x"}, PlainData.of(*nests)))
    assert fields == {"name": "x"}
    return arguments.on(CPU)


def test_plain_data_arrives_as_it_was_sent() -> None:
    generator = torch.Generator().manual_seed(3)
    values = [
        None,
        True,
        7,
        1 << 80,
        -0.0,
        float("inf"),
        2 - 1j,
        b"",
        b"\0\xff",
        "a cat \ud800",
        Path("a"),
        torch.bfloat16,
    ]
    plain = {"prompt": values, 3: (8, 1.5, [True]), (1, "a"): {}}
    tensors = [torch.arange(3.0), torch.ones(2, 0), torch.tensor(5), torch.randn(2, 3, dtype=torch.complex64).conj().T]
    arrays = [np.linspace(0, 1, 3), np.array(["a", "bc"]), np.float32(0.1), np.datetime64("2020-01-01")]
    found, found_tensors, found_arrays, (again,) = _arrived(plain, tensors, arrays, [generator])
    assert repr(found) == repr(plain), "types and signs, too"
    for one, other in zip(found_tensors, tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    for one, other in zip(found_arrays, arrays, strict=True):
        assert type(one) is type(other)
        assert np.array_equal(one, other)
    assert torch.equal(torch.rand(3, generator=again), torch.rand(3, generator=generator))


def test_a_generator_in_several_places_arrives_as_one() -> None:
    generator, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    (found, (again, equal)) = _arrived([generator, generator], [generator, other])
    assert found[0] is found[1] is again
    assert equal is not again, "equal states, but another generator"
    for one in found:
        assert torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=generator))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "1", "P", "I;16", "F", "CMYK"])
def test_images_of_all_modes_arrive(mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (5, 3, 3), dtype=np.uint8)
    image = Image.new(mode, (3, 5), 9) if mode == "I;16" else Image.fromarray(pixels).convert(mode)
    if mode == "P":
        image.info["transparency"] = 4
    (found,) = _arrived(image)
    assert (found.mode, found.size, found.tobytes()) == (mode, image.size, image.tobytes())
    if mode != "I;16":
        assert found.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


class Harmful:
    """What a request must not hold."""

    def __reduce__(self) -> Any:
        return print, ("run on another rank",)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": Harmful()}, r"a is a Harmful"),
        ({"a": [1, {"b": lambda: 1}]}, r"a\[1\]\['b'\] is a function"),
        ({"a": np.array([Harmful()])}, r"a is a ndarray"),
        ({"a": type("Text", (str,), {"__reduce__": Harmful.__reduce__})("x")}, r"a is a Text"),
        ({"a": torch.eye(2).to_sparse()}, r"a is a Tensor, .* dense tensors"),
        ({Harmful: 1}, r"a key is a type"),
    ],
)
def test_other_objects_are_refused_by_their_place(value: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        PlainData.of(value)


def test_values_that_json_cannot_convert_are_refused_by_their_place() -> None:
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep]
    assert _arrived({"a": deep}) == [{"a": deep}]
    for _ in range(400):
        deep = [deep]
    with pytest.raises(ValueError, match=r"^a is nested in more than 64 levels$"):
        PlainData.of({"a": deep})
    with pytest.raises(ValueError, match=r"^a\[0\] is an integer of 16610 bits, which must be at most 4096$"):
        PlainData.of({"a": [10**5000]})


def test_dataclasses_of_diffusers_arrive_and_no_other_class_is_named() -> None:
    image = Image.new("RGB", (3, 5), 9)
    (found,) = _arrived([LTX2VideoCondition(frames=[image], index=4), LTX2VideoCondition(frames=torch.ones(2, 3))])
    assert [type(x) for x in found] == [LTX2VideoCondition] * 2
    assert (found[0].frames[0].tobytes(), found[0].index, found[0].crf) == (image.tobytes(), 4, None)
    assert torch.equal(found[1].frames, torch.ones(2, 3))
    with pytest.raises(TypeError, match="is a PlainData, which is not sent to other ranks"):
        PlainData.of(PlainData([], []))
    for module, name in [("subprocess", "Popen"), ("diffusers.pipelines.ltx2.pipeline_ltx2_condition", "Image")]:
        with pytest.raises(TypeError, match="is not a dataclass of diffusers"):
            PlainData([{"dataclass": [module, name, {"dict": []}]}], []).on(CPU)


def test_outputs_of_diffusers_arrive_as_their_class_and_others_are_refused() -> None:
    sent = LTX2PipelineOutput(frames=[Image.new("RGB", (3, 5), 9)], audio=torch.ones(2, 3))
    (found,) = _arrived(sent)
    assert type(found) is LTX2PipelineOutput
    assert list(found) == ["frames", "audio"]
    assert found.frames[0].tobytes() == found["frames"][0].tobytes() == sent.frames[0].tobytes()
    assert torch.equal(found[1], sent.audio)
    (found,) = _arrived(FluxPipelineOutput(images=None))
    assert (type(found), found.images, list(found)) == (FluxPipelineOutput, None, [])

    @dataclass
    class Own(BaseOutput):
        images: list[int]

    with pytest.raises(TypeError, match=r"a is a Own, which is not sent"):
        PlainData.of({"a": Own(images=[1])})


@pytest.mark.parametrize("text", ["[gloo/transport/tcp/pair.cc] Connection closed by peer", "another failure"])
def test_a_lost_rank_is_one_sentence_for_rank_zero_and_for_those_that_wait(text: str) -> None:
    kind = CallFailedError if "peer" in text else RuntimeError
    said = r"the connection to another rank broke .*: it has exited" if "peer" in text else text
    requests = Requests(mock.Mock(group_name="requests"))
    with mock.patch("lightning_cp.pipelines.serving.requests.dist.broadcast", side_effect=RuntimeError(text)):
        for exchange in (lambda: requests.send({}, PlainData.of()), requests.receive):
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
