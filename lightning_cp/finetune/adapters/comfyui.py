"""Write a LoRA for ComfyUI, which reads other names and metadata than diffusers.

ComfyUI takes the scale of a layer from a tensor `<layer>.alpha`; without it, the scale is 1. It knows the layers of
Flux, FLUX.2, Krea 2, QwenImage, Stable Diffusion 3 and Z-Image by diffusers' names, after "transformer."; those of Wan
and LTX by the names of the original weights, after "diffusion_model.".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.finetune.adapters.lora_file import SECOND_EXPERT, read_lora

COMFYUI_FILE = "comfyui.safetensors"
_SAME_NAMES = (
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "Krea2Transformer2DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "ZImageTransformer2DModel",
)
_UNKNOWN = {"Flux2Transformer2DModel": r"(double|single)_stream_modulation.*|time_guidance_embed\..*"}  # by the model
# Regular expressions for layers of diffusers' models, and the original names.
_WAN = (
    (r"(blocks\.\d+)\.attn1\.to_([qkv])", r"\1.self_attn.\2"),
    (r"(blocks\.\d+)\.attn1\.to_out\.0", r"\1.self_attn.o"),
    (r"(blocks\.\d+)\.attn2\.to_([qkv])", r"\1.cross_attn.\2"),
    (r"(blocks\.\d+)\.attn2\.to_out\.0", r"\1.cross_attn.o"),
    (r"(blocks\.\d+)\.attn2\.add_([kv])_proj", r"\1.cross_attn.\2_img"),
    (r"(blocks\.\d+)\.ffn\.net\.0\.proj", r"\1.ffn.0"),
    (r"(blocks\.\d+)\.ffn\.net\.2", r"\1.ffn.2"),
    (r"condition_embedder\.time_proj", "time_projection.1"),
    (r"condition_embedder\.(text|time)_embedder\.linear_1", r"\1_embedding.0"),
    (r"condition_embedder\.(text|time)_embedder\.linear_2", r"\1_embedding.2"),
    (r"condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
    (r"condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
    (r"patch_embedding", "patch_embedding"),
    (r"proj_out", "head.head"),
)
_LTX = ((r"(transformer_blocks\..+)", r"\1"),)
_LTX2 = (
    *_LTX,
    (r"(audio_)?proj_in", r"\1patchify_proj"),
    (r"(audio_)?time_embed\.(.+)", r"\1adaln_single.\2"),
    (r"(audio_)?prompt_adaln\.(.+)", r"\1prompt_adaln_single.\2"),
    (r"av_cross_attn_(video|audio)_scale_shift\.(.+)", r"av_ca_\1_scale_shift_adaln_single.\2"),
    (r"av_cross_attn_(?:video|audio)_(a2v|v2a)_gate\.(.+)", r"av_ca_\1_gate_adaln_single.\2"),
)
_ORIGINAL = {"WanTransformer3DModel": _WAN, "LTXVideoTransformer3DModel": _LTX, "LTX2VideoTransformer3DModel": _LTX2}


def write_for_comfyui(
    folder: Path, model: str, *, component: str = "transformer", file: str = COMFYUI_FILE
) -> Path | None:
    """Write `comfyui.safetensors` next to the LoRA that `save_lora` has written. Call it on one rank.

    Args:
        folder: folder with the LoRA.
        model: class name of the transformer.
        component: its name in the pipeline.
        file: name of the file to write.
    Returns: path of the file; None if the names of this model, or of an adapted layer, are not known. An older file is
        then removed.
    Raises: ValueError: the LoRA is missing or damaged. OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    path, lora = folder / file, read_lora(folder, component=component, trained=("transformer", SECOND_EXPERT))
    names = comfyui_names(list(lora.layers), model)
    if names is None:
        path.unlink(missing_ok=True)
        return None
    alpha = torch.tensor(float(lora.rank if lora.alpha is None else lora.alpha))
    tensors: dict[str, Tensor] = {}
    for layer, (a, b) in lora.layers.items():
        name = names[layer]
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b, f"{name}.alpha": alpha.clone()}
    with atomic_file(path) as scratch:
        save_file({name: x.contiguous() for name, x in tensors.items()}, scratch, metadata={"format": "pt"})
    return path


def comfyui_names(layers: Sequence[str], model: str) -> Mapping[str, str] | None:
    """Return ComfyUI's name of each layer; None if one is not known.

    >>> comfyui_names(["blocks.0.attn1.to_out.0"], "WanTransformer3DModel")
    {'blocks.0.attn1.to_out.0': 'diffusion_model.blocks.0.self_attn.o'}
    """
    if any(re.fullmatch(_UNKNOWN.get(model, ""), layer) for layer in layers):
        return None
    if model in _SAME_NAMES:
        return {layer: f"transformer.{layer}" for layer in layers}
    renamed, names = _ORIGINAL.get(model), {}
    if renamed is None:
        return None
    for layer in layers:
        matches = ((re.fullmatch(pattern, layer), new) for pattern, new in renamed)
        original = next((m.expand(new) for m, new in matches if m), None)
        if original is None:
            return None
        names[layer] = f"diffusion_model.{original}"
    return names
