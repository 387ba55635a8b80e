"""ControlNets, each with the configuration and the inputs of the tiny transformer that it steers."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import nn

from tests.models import cosmos, flux, hunyuan_dit, qwen_image, sana, sd3, z_image
from tests.models.tiny import Tiny, randn


@dataclass(frozen=True)
class Control(Tiny):
    """A ControlNet.

    Attributes:
        steers: the transformer that it steers.
        fed: names of the transformer's arguments that take its outputs.
    """

    steers: Tiny = flux.TINY["flux"]
    fed: tuple[str, ...] = ("controlnet_block_samples",)

    def build(self, transformer: nn.Module | None = None) -> nn.Module:
        """Args: transformer: the one that it steers, some of its layers are shared with Z-Image's ControlNet."""
        torch.manual_seed(0)
        kind = getattr(diffusers, self.kind)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`FluxPosEmbed` is deprecated", FutureWarning)
            control = kind(**{**_known(kind.__init__, self.steers.config), **self.config}).double().eval()
        for parameter in control.parameters():
            if not parameter.abs().sum():  # its last layers are zero at first
                nn.init.normal_(parameter, std=0.2)
        if self.kind == "ZImageControlNetModel":
            kind.from_transformer(control, transformer or self.steers.build())
            control.gradient_checkpointing = False  # diffusers 0.42.1 forgets to set it
        if self.kind == "CosmosControlNetModel":
            _without_torchvision()
        return control

    def arguments(self) -> dict[str, Any]:
        given = {name: x for name, x in self.steers.arguments().items() if name not in self.fed}
        known = _known(getattr(diffusers, self.kind).forward, given)
        return {**known, **self.inputs(torch.Generator().manual_seed(2))}


def _known(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(function).parameters
    return {name: x for name, x in values.items() if name in names}


def _without_torchvision() -> None:
    """Stands for the one function that Cosmos' ControlNet has from torchvision; the mask is of that size already."""
    from diffusers.models.controlnets import controlnet_cosmos

    resize = SimpleNamespace(resize=lambda x, size, interpolation: x)
    controlnet_cosmos.transforms = SimpleNamespace(functional=resize, InterpolationMode=SimpleNamespace(NEAREST=None))


def _with_layers(tiny: Tiny, layers: int) -> Tiny:
    return replace(tiny, config={**tiny.config, "num_layers": layers})


def _cosmos(g: torch.Generator) -> dict[str, Any]:
    return {
        "controls_latents": randn(g, 2, 4, 5, 2, 14),
        "latents": cosmos.TINY["cosmos_transfer"].arguments()["hidden_states"],
        "condition_mask": torch.rand(2, 1, 5, 2, 14, generator=g, dtype=torch.float64),
        "padding_mask": torch.rand(1, 1, 2, 14, generator=g, dtype=torch.float64),
        "conditioning_scale": [0.5, 2.0],
    }


def _z_image(g: torch.Generator) -> dict[str, Any]:
    pictures = z_image.TINY["z_image"].arguments()["x"]
    return {"control_context": [randn(g, *x.shape) for x in pictures], "conditioning_scale": 0.7}


_FLUX_FED = ("controlnet_block_samples", "controlnet_single_block_samples")
_FLUX = Control(
    "FluxControlNetModel",
    {"num_layers": 2, "num_single_layers": 1},
    lambda g: {"controlnet_cond": randn(g, 2, 15, 4), "conditioning_scale": 0.7},
    steers=flux.TINY["flux"],
    fed=_FLUX_FED,
)
_SD3 = Control(
    "SD3ControlNetModel",
    {"num_layers": 2, "dual_attention_layers": ()},
    lambda g: {"controlnet_cond": randn(g, 2, 4, 3, 5), "conditioning_scale": 0.7},
    steers=sd3.TINY["sd3"],
    fed=("block_controlnet_hidden_states",),
)
_Z_IMAGE = Control(
    "ZImageControlNetModel",
    {
        "control_in_dim": 16,
        "control_layers_places": [0, 1],
        "control_refiner_layers_places": [0],
        "add_control_noise_refiner": "control_noise_refiner",
    },
    _z_image,
    steers=z_image.TINY["z_image"],
)

TINY = {
    "control_flux": _FLUX,
    "control_flux_mode": replace(
        _FLUX,
        config={"num_layers": 2, "num_single_layers": 0, "num_mode": 4},
        inputs=lambda g: {**_FLUX.inputs(g), "controlnet_mode": torch.tensor([[2], [1]])},
    ),
    "control_flux_single": replace(_FLUX, config={"num_layers": 0, "num_single_layers": 2}),
    "control_sd3": _SD3,
    "control_sd3_dual": replace(_SD3, config={"num_layers": 2, "dual_attention_layers": (0,)}),
    "control_sd3_without_text": replace(
        _SD3,
        config={"num_layers": 2, "joint_attention_dim": None, "use_pos_embed": False},
        inputs=lambda g: {**_SD3.inputs(g), "hidden_states": randn(g, 2, 15, 32), "encoder_hidden_states": None},
    ),
    "control_qwen_image": Control(
        "QwenImageControlNetModel",
        {"num_layers": 1, "extra_condition_channels": 1},
        lambda g: {"controlnet_cond": randn(g, 2, 15, 17), "conditioning_scale": 0.7},
        steers=qwen_image.TINY["qwen_image"],
    ),
    "control_hunyuan_dit": Control(
        "HunyuanDiT2DControlNetModel",
        {"transformer_num_layers": 6},
        lambda g: {"controlnet_cond": randn(g, 2, 4, 6, 10), "conditioning_scale": 0.7},
        steers=_with_layers(hunyuan_dit.TINY["hunyuan_dit"], 6),
    ),
    "control_sana": Control(
        "SanaControlNetModel",
        {"num_layers": 2},
        lambda g: {"controlnet_cond": randn(g, 2, 4, 7, 5), "conditioning_scale": 0.7},
        steers=_with_layers(sana.TINY["sana"], 3),
    ),
    "control_z_image": _Z_IMAGE,
    "control_z_image_unrefined": replace(
        _Z_IMAGE, config={"control_in_dim": 16, "control_layers_places": [0], "n_refiner_layers": 1}
    ),
    "control_cosmos": Control(
        "CosmosControlNetModel",
        {"n_controlnet_blocks": 2, "in_channels": 6, "latent_channels": 6, "model_channels": 48},
        _cosmos,
        steers=cosmos.TINY["cosmos_transfer"],
        fed=("block_controlnet_hidden_states",),
    ),
}
