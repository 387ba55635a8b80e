"""Keys and values counted without storage are those that an evaluation of the model fills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig
from lightning_cp.engine.apply import parallelize
from lightning_cp.mesh.groups import SINGLE_RANK
from lightning_cp.nest import replace
from lightning_cp.pipelines.pipefusion.buffer_memory import count_without_storage
from lightning_cp.pipelines.pipefusion.evaluation import PatchEvaluation
from lightning_cp.pipelines.pipefusion.key_buffers import Buffer
from lightning_cp.plans import REGISTERED
from tests.models import TINY

_SUPPORTED = [name for name, tiny in TINY.items() if REGISTERED[tiny.kind].patches is not None]
_DEFAULT = ("flux", "wan", "sd3", "cogvideox_masked", "cogview4_masked", "sana")
_READ_VALUES = (
    *("framepack", "framepack_one_sample", "hunyuan_image", "joyimage_items", "lumina2", "lumina2_no_mask"),
    *("ltx2_cross_timestep", "ltx2_newer", "omnigen", "omnigen_unconditioned"),
)


def _described(buffers: Iterable[Buffer]) -> Counter[tuple[Any, ...]]:
    """The shapes and dtypes of K, V and the mask, and how often there are buffers of them."""
    return Counter(tuple((tuple(x.shape), x.dtype) for x in buffer.tensors) for buffer in buffers)


def _filled(model: nn.Module, arguments: dict[str, Any]) -> list[Buffer]:
    """The buffers of an evaluation of the whole sequence."""
    installed = parallelize(model, ContextParallelConfig(), check_peers="off", groups=SINGLE_RANK)
    evaluation = PatchEvaluation.of(installed.session, 3)
    evaluation.begin(None)
    with installed.session.evaluating(evaluation), torch.no_grad():
        model(**arguments)
    return evaluation.buffers


def _in_float32(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _DEFAULT else pytest.mark.full) for name in _SUPPORTED]
)
def test_counts_are_the_buffers_of_an_evaluation(name: str) -> None:
    model = TINY[name].build().float()
    arguments = replace(Tensor, _in_float32, {**TINY[name].arguments(), "return_dict": False})
    if name in _READ_VALUES:  # they are checked after the first block (tests/dist/pipelines/test_buffer_memory.py)
        with pytest.raises(RuntimeError, match=r"nonzero|_local_scalar_dense"):
            count_without_storage(model, (), arguments, patches=3)
        return
    before = torch.get_rng_state()
    found = count_without_storage(model, (), arguments, patches=3)
    assert torch.equal(torch.get_rng_state(), before)
    counted = [*found.others, *(buffer for of_block in found.blocks for buffer in of_block)]
    filled = _described(_filled(model, arguments))
    if name == "cogview4_training":  # a new model has the other processor, which makes no masks of this size
        filled = Counter({key: number for key, number in filled.items() if key[0][1] != torch.bool})
    assert _described(counted) == filled
    assert any(found.blocks)


def test_counts_have_the_dtype_of_autocast() -> None:
    model = TINY["flux"].build().float()
    arguments = replace(Tensor, _in_float32, {**TINY["flux"].arguments(), "return_dict": False})
    with torch.autocast("cpu", torch.bfloat16):
        found = count_without_storage(model, (), arguments, patches=3)
        filled = _filled(model, arguments)
    assert _described(buffer for of_block in found.blocks for buffer in of_block) == _described(filled)
    assert {x.dtype for buffer in filled for x in buffer.tensors} == {torch.bfloat16}
