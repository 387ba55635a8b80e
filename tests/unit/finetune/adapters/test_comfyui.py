"""The LoRA for ComfyUI: diffusers' own reader of Wan's original names finds the same weights."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_cp.export import save_lora
from lightning_cp.finetune import LoraSettings, add_lora
from lightning_cp.finetune.adapters.comfyui import COMFYUI_FILE, comfyui_names, write_for_comfyui
from tests.models import TINY


def _saved(folder: Path, name: str, targets: str, component: str = "transformer") -> dict[str, Tensor]:
    """Save an adapter with weights and a scale of 3 / 2. Returns: its deltas by layer."""
    model = TINY[name].build().float()
    layers = add_lora(model, LoraSettings(rank=2, alpha=3.0, targets=targets))
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    save_lora(model, folder, component=component)
    found = {}
    for layer in layers:
        adapter = model.get_submodule(layer)
        a, b = adapter.lora_A["default"].weight.detach(), adapter.lora_B["default"].weight.detach()
        found[layer] = 1.5 * b.flatten(1) @ a.flatten(1)
    return found


LAYERS_OF_BLOCKS = r"(transformer_)?blocks\..*(to_[qkv]|to_out\.0|ffn?\.net.*)"
LTX2_LAYERS = r".*(to_[qkv]|to_out\.0|ff\.net.*|(audio_)?proj_in|time_embed\..*|scale_shift\..*|_gate\..*)"


@pytest.mark.parametrize(
    ("name", "pipeline", "model", "targets"),
    [
        ("wan", "WanPipeline", "WanTransformer3DModel", LAYERS_OF_BLOCKS),
        ("ltx", "LTXPipeline", "LTXVideoTransformer3DModel", LAYERS_OF_BLOCKS),
        ("ltx2", "LTX2Pipeline", "LTX2VideoTransformer3DModel", LTX2_LAYERS),
        ("ltx2_newer", "LTX2Pipeline", "LTX2VideoTransformer3DModel", rf"{LTX2_LAYERS}|.*prompt_adaln\..*"),
    ],
)
@pytest.mark.default(1)
def test_diffusers_reads_a_lora_by_the_original_names(
    name: str, pipeline: str, model: str, targets: str, tmp_path: Path
) -> None:
    expected = _saved(tmp_path, name, targets)
    assert write_for_comfyui(tmp_path, model) == tmp_path / COMFYUI_FILE
    read = getattr(diffusers, pipeline).lora_state_dict(str(tmp_path), weight_name=COMFYUI_FILE)
    # diffusers applies the scale of Wan's LoRA to its weights, and leaves that of LTX's in tensors of its own
    scales = {name.removesuffix(".alpha"): float(read.pop(name)) / 2 for name in list(read) if name.endswith(".alpha")}
    names = {name.removeprefix("transformer.").rpartition(".lora_")[0] for name in read}
    assert names == expected.keys()
    for name, delta in expected.items():
        a, b = (read[f"transformer.{name}.lora_{kind}.weight"] for kind in "AB")
        torch.testing.assert_close(scales.get(f"transformer.{name}", 1.0) * b @ a, delta)


@pytest.mark.parametrize(
    ("name", "model", "targets"),
    [
        ("flux", "FluxTransformer2DModel", ".*"),
        ("flux2", "Flux2Transformer2DModel", r".*(to_[qkv]|to_out(\.0)?|to_qkv_mlp_proj|linear_in|x_embedder)"),
        ("krea2", "Krea2Transformer2DModel", ".*"),
        ("sd3", "SD3Transformer2DModel", ".*"),
        ("z_image", "ZImageTransformer2DModel", ".*"),
    ],
)
def test_comfyui_scales_by_alpha(name: str, model: str, targets: str, tmp_path: Path) -> None:
    expected = _saved(tmp_path, name, targets)
    write_for_comfyui(tmp_path, model)
    tensors = load_file(tmp_path / COMFYUI_FILE)
    assert len(tensors) == 3 * len(expected)
    for layer, delta in expected.items():
        a, b = (tensors[f"transformer.{layer}.lora_{kind}.weight"] for kind in "AB")
        scale = tensors[f"transformer.{layer}.alpha"].item() / a.shape[0]
        torch.testing.assert_close(scale * b.flatten(1) @ a.flatten(1), delta)


def test_models_and_layers_that_comfyui_does_not_know_get_no_file(tmp_path: Path) -> None:
    _saved(tmp_path, "wan", r"blocks\..*to_q", component="transformer_2")
    assert write_for_comfyui(tmp_path, "WanTransformer3DModel", component="transformer_2") is not None
    assert write_for_comfyui(tmp_path, "CogVideoXTransformer3DModel", component="transformer_2") is None
    assert not (tmp_path / COMFYUI_FILE).exists()
    for layer in ("single_stream_modulation.linear", "time_guidance_embed.timestep_embedder.linear_1"):
        assert comfyui_names(["x_embedder", layer], "Flux2Transformer2DModel") is None
    assert comfyui_names(["blocks.0.attn1.norm_q"], "WanTransformer3DModel") is None
    assert comfyui_names(["condition_embedder.time_embedder.linear_2"], "WanTransformer3DModel") == {
        "condition_embedder.time_embedder.linear_2": "diffusion_model.time_embedding.2"
    }
