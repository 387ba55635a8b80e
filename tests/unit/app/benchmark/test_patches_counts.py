"""Counts of models without storage equal the formulas, and what the buffers of a real evaluation hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from torch import nn

from lightning_cp import ContextParallelConfig
from lightning_cp.app.benchmark.patches_counts import ByteCounts, Size, count_patches, table
from lightning_cp.engine.apply import parallelize
from lightning_cp.pipelines.pipefusion.patches import PatchEvaluation


def _flux() -> tuple[nn.Module, dict[str, Any], Size]:
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=3, attention_head_dim=12, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=6, axes_dims_rope=(4, 4, 4),
    )  # fmt: skip
    arguments = {
        "hidden_states": torch.randn(1, 15, 4),
        "encoder_hidden_states": torch.randn(1, 7, 8),
        "pooled_projections": torch.randn(1, 6),
        "timestep": torch.rand(1),
        "img_ids": torch.zeros(15, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    return model.to(torch.bfloat16), arguments, Size(15 + 7, 4, 24)


def _wan() -> tuple[nn.Module, dict[str, Any], Size]:
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=16,
        ffn_dim=32, num_layers=3, rope_max_seq_len=32,
    )  # fmt: skip
    arguments = {
        "hidden_states": torch.randn(1, 4, 3, 4, 6),
        "encoder_hidden_states": torch.randn(1, 5, 8),
        "timestep": torch.rand(1),
    }
    return model.to(torch.bfloat16), arguments, Size(3 * 2 * 3, 3, 24)


def _in_bfloat16(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**{name: x.to(torch.bfloat16) for name, x in arguments.items()}, "return_dict": False}


def _counted(model: nn.Module, arguments: dict[str, Any]) -> ByteCounts:
    return count_patches(
        model.to("meta"), _in_bfloat16({name: x.to("meta") for name, x in arguments.items()}), patches=3
    )


@pytest.mark.parametrize("made", [_flux, _wan])
def test_counts_are_those_of_the_formulas_and_of_a_real_evaluation(made: Any) -> None:
    model, arguments, size = made()
    weights = sum(x.nbytes for x in model.parameters())
    counts = _counted(model, arguments)
    assert counts.buffers == [2 * size.one_tensor] * size.blocks
    assert counts.outputs == [size.one_tensor] * size.blocks
    assert sum(counts.weights) + counts.other_weights == weights

    model, arguments, _ = made()
    installed = parallelize(model, ContextParallelConfig(), check_peers="off")
    evaluation = PatchEvaluation.of(installed.session, 3)
    evaluation.begin(None)
    with installed.session.evaluating(evaluation), torch.no_grad():
        model(**_in_bfloat16(arguments))
    assert sum(x.nbytes for buffer in evaluation.buffers for x in buffer.tensors) == sum(counts.buffers)


def test_the_stage_with_the_most_is_counted() -> None:
    model, arguments, size = _flux()
    counts = _counted(model, arguments)
    assert counts.weights[0] > 2 * counts.weights[1]  # a block with streams of its own for text and image
    weights, buffers, sent = counts.largest(2)
    assert weights == counts.other_weights + sum(counts.weights[:2])
    assert (buffers, sent) == (2 * 2 * size.one_tensor, size.one_tensor)


def test_the_table_has_a_row_for_each_number_of_devices_up_to_the_blocks() -> None:
    model, arguments, size = _flux()
    counts = _counted(model, arguments)
    assert [row.split(" | ")[0] for row in table(counts, size)[2:]] == ["| 2", "| 4"]
