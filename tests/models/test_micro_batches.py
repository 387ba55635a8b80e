"""Transformer calls divided into micro-batches of samples: joined, they are the result of the whole call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.engine.check import KeepFloat64
from lightning_cp.errors import ShapeError
from lightning_cp.nest import tensors
from lightning_cp.pipelines.samples import divide_samples, join_samples, main_argument
from lightning_cp.plans import REGISTERED
from tests.models import FIRST, TINY

_DEFAULT = ("flux", "hunyuan_video", "z_image", "qwen_image")
_ONE_SAMPLE = {"framepack_one_sample"}
_TRIED = (*_DEFAULT, *_ONE_SAMPLE, *list(FIRST.values())[2::4])
_SETTINGS = {name: REGISTERED[tiny.kind].patches for name, tiny in TINY.items() if not tiny.training}
_DIVIDED = [name for name in dict.fromkeys(_TRIED) if (x := _SETTINGS.get(name)) and x.stages and x.samples]


def _result(model: nn.Module, arguments: dict[str, Any]) -> Any:
    with KeepFloat64(), torch.no_grad():
        return model(**copy.deepcopy(arguments))


def _floats(result: Any) -> list[Tensor]:
    return [x for x in tensors(result) if x.is_floating_point()]


@pytest.mark.parametrize("name", _DIVIDED)
@pytest.mark.default(len(_DEFAULT))
def test_micro_batches_give_the_result_of_the_whole_call(name: str) -> None:
    model, arguments = TINY[name].build(), {**TINY[name].arguments(), "return_dict": False}
    whole, batches = _result(model, arguments), divide_samples(model, (), arguments, 4)
    sizes = [len(main_argument(model, *batch)) for batch in batches]
    assert sizes == [1] * len(main_argument(model, (), arguments))
    assert (len(sizes) == 1) == (name in _ONE_SAMPLE)
    joined = join_samples([_result(model, batch) for _, batch in batches], sizes)
    assert type(joined) is type(whole)
    for a, b in zip(_floats(whole), _floats(joined), strict=True):
        assert float((a - b).abs().max() / a.abs().max()) < 1e-12


def test_five_samples_in_three_batches_of_a_form() -> None:
    model, arguments = TINY["flux"].build(), TINY["flux"].arguments()
    five = {k: torch.cat([x, x, x[:1] * 2]) if x.ndim and len(x) == 2 else x for k, x in arguments.items()}
    batches = divide_samples(model, (), five, 3)
    assert [len(batch["hidden_states"]) for _, batch in batches] == [2, 2, 1]
    whole, joined = _result(model, five), join_samples([_result(model, x) for _, x in batches], [2, 2, 1])
    assert type(joined) is type(whole)
    assert float((joined.sample - whole.sample).abs().max()) < 1e-12


def test_positions_are_the_same_for_all_samples() -> None:
    model = TINY["flux"].build()
    divided = {"hidden_states": torch.zeros(3, 5, 4), "timestep": torch.zeros(3), "indices_history": torch.zeros(3, 2)}
    whole = {"txt_ids": torch.zeros(3, 3), "indices_clean": torch.zeros(3), "visual_rope_pos": [torch.zeros(3)] * 3}
    for _, batch in divide_samples(model, (), divided | whole, 3):
        assert {name: len(batch[name]) for name in divided} == dict.fromkeys(divided, 1)
        assert {name: len(batch[name]) for name in whole} == dict.fromkeys(whole, 3)
        assert all(len(x) == 3 for x in batch["visual_rope_pos"])


def test_a_result_without_the_samples_is_refused() -> None:
    with pytest.raises(ShapeError, match="must have"):
        join_samples([torch.zeros(1, 2), torch.zeros(2, 2)], [1, 1])
