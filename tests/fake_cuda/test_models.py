"""Whole models on fake CUDA tensors: forward, backward and an SGD step, with nothing that the host waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from torch import nn

from lightning_cp import ContextParallelConfig
from lightning_cp.engine import apply
from lightning_cp.mesh.groups import groups_for
from tests.fake_cuda.test_attention import MODES
from tests.fake_cuda.world import CrossingRecorder, fake_cuda, fake_ranks, run_backward
from tests.harness.cases import in_turn


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    with fake_ranks():
        yield


def wan(width: int) -> tuple[nn.Module, dict[str, Any]]:
    """Args: width: of the latents; 10: 45 tokens, which 4 ranks cannot divide equally; 16: 72 tokens."""
    model = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=16, num_layers=2, ffn_dim=64, text_dim=32, freq_dim=32
    )
    inputs = {
        "hidden_states": torch.empty(1, 16, 3, 6, width, dtype=torch.bfloat16),
        "timestep": torch.empty(1),
        "encoder_hidden_states": torch.empty(1, 7, 32, dtype=torch.bfloat16),
    }
    return model, inputs


def flux(width: int) -> tuple[nn.Module, dict[str, Any]]:
    """Args: width: 10: 35 tokens; 16: 56 tokens."""
    model = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    tokens = 7 * width // 2
    inputs = {
        "hidden_states": torch.empty(1, tokens, 16, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.empty(1, 7, 32, dtype=torch.bfloat16),
        "pooled_projections": torch.empty(1, 32, dtype=torch.bfloat16),
        "timestep": torch.empty(1, dtype=torch.bfloat16),
        "img_ids": torch.empty(tokens, 3),
        "txt_ids": torch.empty(7, 3),
    }
    return model, inputs


def steps_of(model: nn.Module, inputs: dict[str, Any]) -> Callable[[], None]:
    """A training step, then a forward without gradients, as in sampling."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def steps() -> None:
        out = model(**inputs, return_dict=False)[0]
        assert out.device.type == "cuda"
        run_backward(out.square().mean())
        missing = [name for name, x in model.named_parameters() if x.grad is None]
        assert not missing
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(**inputs, return_dict=False)

    return steps


def found_in(steps: Callable[[], None], recorder: CrossingRecorder) -> tuple[list[str], list[str]]:
    """Operators that involve both devices, and those that the host waits for, after a warm-up."""
    steps()
    recorder.clear()
    steps()
    return list(recorder.crossings), list(recorder.waits)


@pytest.mark.parametrize(("mode", "build", "width"), in_turn(MODES, (wan, flux), (10, 10, 16, 16)))
@pytest.mark.full
def test_the_host_waits_for_no_more_than_without_ranks(mode: str, build: Any, width: int) -> None:
    ring, ulysses, rotate_method = MODES[mode]
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, rotate_method=rotate_method)
    groups_for(config)  # the mesh is built from real tensors
    with fake_cuda() as recorder, torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)  # `to` cannot convert fake parameters in place
        try:
            model, inputs = build(width)
        finally:
            torch.set_default_dtype(torch.float32)
        steps = steps_of(model, inputs)
        alone = found_in(steps, recorder)  # the model's own code may build tables on the host
        with mock.patch.object(apply, "compare_settings"):  # reads the shares of all ranks
            apply.parallelize(model, config, check_peers="off")
        assert found_in(steps, recorder) == alone
