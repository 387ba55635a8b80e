"""Check that the sizes of a pipeline's transformer and of its encoders fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_cp.errors import FamilyError
from lightning_cp.families import Family


@dataclass(frozen=True)
class _Widths:
    """Names of the sizes in a transformer's config.

    Args:
        latents: key of the number of input channels, or of output channels if conditions are joined to the input.
        packed: number of latents in a token: input channels = latent channels × packed.
        text: key of the width of the text embeddings.
    """

    latents: str
    packed: int
    text: str


_OF_VAE = {"scaling_factor", "shift_factor", "latents_mean", "latents_std"}  # facts with the VAE's names
_WIDTHS = {
    "FluxTransformer2DModel": _Widths("in_channels", 4, "joint_attention_dim"),
    "SD3Transformer2DModel": _Widths("in_channels", 1, "joint_attention_dim"),
    "QwenImageTransformer2DModel": _Widths("in_channels", 4, "joint_attention_dim"),
    "WanTransformer3DModel": _Widths("out_channels", 1, "text_dim"),
    "CogVideoXTransformer3DModel": _Widths("out_channels", 1, "text_embed_dim"),
}


def check_fits(
    source: str, component: str, model: str, config: Mapping[str, Any], sample: Mapping[str, Tensor]
) -> None:
    """Compare a transformer's config with an encoded sample. Classes of other families are not checked.

    Args:
        source: the pipeline, for errors.
        component: name of the transformer.
        model: its class name.
        config: its config.
        sample: stored tensors of a sample, "latents" as the VAE returns them: [channels, ...].
    Raises: FamilyError: the VAE or the text encoder belongs to another transformer.
    """
    widths = _WIDTHS.get(model)
    if widths is None:
        return
    found = {
        widths.latents: (sample["latents"].shape[0] * widths.packed, "VAE", "latent channels"),
        widths.text: (sample["prompt_embeds"].shape[-1], "text encoder", "text embeddings of width"),
    }
    for key, (size, part, what) in found.items():
        if config.get(key, size) != size:
            raise FamilyError(
                f"the parts of model.pretrained={source} do not fit: its {part} makes {what} {size}, but the "
                f"{component} has {key}={config[key]}. One of them is from another pipeline: download or copy it again"
            )


def check_cache(
    folder: Path, family: Family, sample: Mapping[str, Tensor], source: str, vae: Mapping[str, Any]
) -> None:
    """Compare the facts and the dtypes of a cache with the pipeline that it trains.

    Args:
        folder: the cache, for errors.
        family: the family with the facts that the cache has stored.
        sample: stored tensors of a sample.
        source: the pipeline, for errors.
        vae: config of its VAE; empty if it is not here.
    Raises: FamilyError: names the fact, its value in the cache, and the pipeline's.
    """
    again = "encode the data with this pipeline (recipes/precompute.py, another output)"
    for name in _OF_VAE & family.facts.keys():
        stored = family.facts[name]
        if name in vae and vae[name] != stored:
            raise FamilyError(
                f"data.path={folder} has {name}={stored}, but the VAE of model.pretrained={source} has "
                f"{name}={vae[name]}: {again}"
            )
        if name in ("scaling_factor", "latents_std") and not _are_positive(stored):
            raise FamilyError(f"data.path={folder} has {name}={stored}, which must be positive: {again}")
    for name, x in sample.items():
        if (name.startswith("latents") or name in family.text.names) and not x.is_floating_point():
            raise FamilyError(f"data.path={folder} has {name} in {x.dtype}, which must be a float dtype: {again}")


def _are_positive(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(x, (int, float)) and 0 < x < math.inf for x in values)
