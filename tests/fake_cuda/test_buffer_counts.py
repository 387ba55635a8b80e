"""Keys and values are counted on fake CUDA tensors, as a parallel pipeline does on a GPU."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.compat.torch_names import fake_tensors
from lightning_cp.nest import replace
from lightning_cp.pipelines.pipefusion.buffer_memory import count_without_storage
from tests.models import TINY


@pytest.mark.full
@pytest.mark.parametrize("name", ["flux", "wan", "hunyuan_video", "ernie_image"])
def test_counted_buffers_are_on_the_device(name: str) -> None:
    model = TINY[name].build().float()
    with fake_tensors():
        arguments = replace(
            torch.Tensor,
            lambda x: torch.empty(x.shape, dtype=torch.float32 if x.is_floating_point() else x.dtype, device="cuda"),
            {**TINY[name].arguments(), "return_dict": False},
        )
    counts = count_without_storage(model, (), arguments, patches=3)
    keys, _ = counts.blocks[0][0].tensors[:2]
    assert keys.device == torch.device("cuda", 0)
    assert keys.dtype == torch.float32
