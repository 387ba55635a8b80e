"""Rules for side models that can be trained, from config files. Imports neither torch nor diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONTROLNET = "controlnet"  # name of the component
VACE = "vace_"  # begin of the names of the weights that are trained in a transformer with VACE
_TRAINED = ("FluxControlNetModel", "QwenImageControlNetModel")
_OTHER_KINDS = {
    "num_mode": "it is a union of several kinds of control (num_mode); data have no mode of each sample",
    "conditioning_embedding_channels": "it takes pixels (conditioning_embedding_channels), not latents of the control",
    "extra_condition_channels": "it is for inpainting (extra_condition_channels): data have no mask of each sample",
}
_WIDTH = ("num_attention_heads", "attention_head_dim")


def controlnet_error(kind: str, config: Mapping[str, Any], transformer: Mapping[str, Any]) -> str | None:
    """Return why a ControlNet cannot be trained; None if it can.

    Args: kind: its class name. config: its config. transformer: the config of the pipeline's transformer.
    """
    if kind not in (*_TRAINED, "ConfigOnly"):  # of a pipeline that is loaded without its weights
        return f"the controlnet is a {kind}, but must be one model: {' or '.join(_TRAINED)}"
    for key, reason in _OTHER_KINDS.items():
        if config.get(key):
            return f"the controlnet has no family for training: {reason}"
    for key in _WIDTH:
        if key in config and key in transformer and config[key] != transformer[key]:
            return (
                f"the controlnet has {key}={config[key]}, but the transformer has {transformer[key]}: make it with "
                f"from_transformer(..., {key}={transformer[key]})"
            )
    return None
