"""Samples in patches: exact if each evaluation is whole, otherwise an approximation; nothing is left on the model."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel

from lightning_cp import ContextParallelConfig
from lightning_cp.app.benchmark.patches_quality import samples_in_patches
from lightning_cp.app.benchmark.trained_digits import TrainedDigits, psnr
from lightning_cp.app.denoisers import WanDenoiser
from lightning_cp.app.settings.trained import TrainedDenoiser
from lightning_cp.engine.apply import parallelize
from lightning_cp.pipelines import sampling_ranks


def _digits() -> TrainedDigits:
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        in_channels=1,
        out_channels=1,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        ffn_dim=32,
        freq_dim=16,
        text_dim=16,
        rope_max_seq_len=32,
    )
    module = WanDenoiser(transformer, num_classes=10, num_tokens=2).eval()
    parallel = ContextParallelConfig()
    return TrainedDigits(
        TrainedDenoiser("WanDenoiser", 10, 2, None, (1, 2, 4, 6), False, 2, 2, 2.0),
        module,
        parallelize(transformer, parallel),
        sampling_ranks(parallel),
        torch.randn(2, 1, 2, 4, 6),
        torch.tensor([3, 7]),
    )


def test_whole_evaluations_are_exact_and_patches_are_not() -> None:
    digits = _digits()
    exact = samples_in_patches(digits, patches=1, warmup=1)
    assert digits.evaluations == 4
    assert torch.equal(samples_in_patches(digits, patches=3, warmup=4), exact)
    assert 0 < float((samples_in_patches(digits, patches=3, warmup=3) - exact).abs().max()) < 1
    assert torch.equal(samples_in_patches(digits, patches=1, warmup=1), exact)


def test_psnr_is_for_a_range_of_two() -> None:
    exact = torch.zeros(10)
    assert psnr(exact + 0.2, exact) == pytest.approx(20.0, rel=1e-5)
    assert psnr(exact, exact) == float("inf")
