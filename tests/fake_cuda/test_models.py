"""Whole models on fake CUDA tensors: nothing crosses devices between the model's inputs and its output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from torch import nn

from lightning_cp import ContextParallelConfig
from lightning_cp.engine.apply import parallelize
from lightning_cp.mesh import groups_for
from tests.fake_cuda.test_attention import MODES
from tests.fake_cuda.world import fake_cuda, fake_ranks

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch build with CUDA")


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    with fake_ranks():
        yield


def wan() -> tuple[nn.Module, dict[str, Any]]:
    model = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=16, num_layers=2, ffn_dim=64, text_dim=32, freq_dim=32
    )
    inputs = {
        "hidden_states": torch.empty(1, 16, 3, 6, 10, dtype=torch.bfloat16),
        "timestep": torch.empty(1),
        "encoder_hidden_states": torch.empty(1, 7, 32, dtype=torch.bfloat16),
    }
    return model, inputs


def flux() -> tuple[nn.Module, dict[str, Any]]:
    model = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.empty(1, 35, 16, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.empty(1, 7, 32, dtype=torch.bfloat16),
        "pooled_projections": torch.empty(1, 32, dtype=torch.bfloat16),
        "timestep": torch.empty(1, dtype=torch.bfloat16),
        "img_ids": torch.empty(35, 3),
        "txt_ids": torch.empty(7, 3),
    }
    return model, inputs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [wan, flux])
def test_nothing_crosses_devices_in_a_forward(mode: str, build: Any) -> None:
    ring, ulysses, rotate_method = MODES[mode]
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, rotate_method=rotate_method)
    groups_for(config)  # the mesh is built from real tensors
    with fake_cuda() as recorder, torch.device("cuda"), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)  # `to` cannot convert fake parameters in place
        try:
            model, inputs = build()
        finally:
            torch.set_default_dtype(torch.float32)
        recorder.crossings.clear()
        model(**inputs)
        alone = list(recorder.crossings)  # the model's own code may build tables on the host
        recorder.crossings.clear()
        parallelize(model, config, check_peers="off")
        out = model(**inputs, return_dict=False)[0]
    assert out.device.type == "cuda"
    assert recorder.crossings == alone
