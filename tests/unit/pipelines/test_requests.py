"""Requests to other ranks hold plain data only, and arrive as they were sent."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_cp.pipelines.requests import sendable

CPU = torch.device("cpu")


def test_plain_data_arrives_as_it_was_sent() -> None:
    generator = torch.Generator().manual_seed(3)
    given: dict[str, Any] = {
        "prompt": ["a cat", None],
        "size": (8, 1.5, True),
        "latents": torch.arange(3.0),
        "sigmas": np.linspace(0, 1, 3),
        "image": Image.new("RGB", (2, 3), "red"),
        "generator": [generator],
    }
    found = pickle.loads(pickle.dumps(sendable(given))).on(CPU)
    assert found["prompt"] == ["a cat", None]
    assert found["size"] == (8, 1.5, True)
    assert torch.equal(found["latents"], given["latents"])
    assert np.array_equal(found["sigmas"], given["sigmas"])
    assert found["image"].tobytes() == given["image"].tobytes()
    assert torch.equal(torch.rand(3, generator=found["generator"][0]), torch.rand(3, generator=generator))


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
    ],
)
def test_other_objects_are_refused_by_their_place(value: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        sendable(value)
